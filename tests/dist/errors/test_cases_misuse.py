"""Faults that users met with non-finite values, the order of operations, and misuse."""

import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardclip import GradClipper, clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from tests.ranks import count_collectives, dtensor_operations, on_ranks
from tests.ranks.tensors import S0, S1, R, Sharded, labelled, local_of, mesh_of, parameter, sharded
from tests.ranks.unsharded import CLIPS, assert_norm, assert_one_all_reduce
from tests.ranks.warned import recorded

F = torch.tensor
BOTH = pytest.mark.parametrize("clip", CLIPS)
BAD = pytest.mark.parametrize("bad", [math.inf, math.nan])


def bad_on_one_rank(bad: float) -> nn.Parameter:
    """Rank 0 holds [bad, 1], rank 1 holds [3, 4]."""
    return parameter(sharded(F([bad, 1.0, 3.0, 4.0]), mesh_of(2), [S0]))


@BAD
@BOTH
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@on_ranks(2)
def test_propagate_does_what_torch_does_with_the_unsharded_gradient(bad, clip, norm_type):
    # pytorch #46849
    whole = parameter(F([bad, 1.0, 3.0, 4.0]))
    expected = nn.utils.clip_grad_norm_([whole], 1.0, norm_type)
    made = bad_on_one_rank(bad)
    norm = CLIPS[clip]([made], 1.0, norm_type)
    assert_norm(norm, expected.item())
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    torch.testing.assert_close(local_of(made.grad), whole.grad[rows], equal_nan=True)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, math.inf])
@BOTH
@on_ranks(4)
def test_a_nan_on_any_rank_is_a_nan_everywhere(rank, norm_type, clip):
    """Gloo's MAX drops a NaN unless it is on rank 0."""
    full = torch.ones(8)
    full[2 * rank] = math.nan
    made = parameter(sharded(full, mesh_of(4), [S0]))
    assert_norm(CLIPS[clip]([made], 1.0, norm_type), math.nan)
    assert local_of(made.grad).isnan().all()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks(4)
def test_a_nan_on_one_rank_beats_an_inf_on_another(norm_type):
    full = torch.ones(8)
    full[0], full[5] = math.inf, math.nan
    assert_norm(get_total_norm([sharded(full, mesh_of(4), [S0])], norm_type), math.nan)


@BAD
@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_skip_leaves_gradients_and_optimizer_alone_and_counts(bad, fused):
    # DeepSpeed #8415
    made = bad_on_one_rank(bad)
    optimizer = torch.optim.AdamW([made], lr=0.1, fused=fused)
    clipper = GradClipper([("weight", made)], 1.0, nonfinite="skip")
    before = local_of(made.grad).clone()
    result = clipper.step(optimizer)
    assert result.skipped
    assert not result.finite
    assert clipper.skipped == 1
    assert torch.equal(local_of(made.data), torch.zeros(2))
    torch.testing.assert_close(local_of(made.grad), before, rtol=0, atol=0, equal_nan=True)
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())
    made.grad = sharded(F([2.0, 1.0, 3.0, 4.0]), mesh_of(2), [S0])
    result = clipper.step(optimizer)
    assert not result.skipped
    assert clipper.skipped == 1
    assert local_of(made.data).abs().min() > 0.09


@BAD
@on_ranks(2)
def test_skip_by_clip_says_so_and_touches_nothing(bad):
    made = bad_on_one_rank(bad)
    before = local_of(made.grad).clone()
    clipper = GradClipper([("weight", made)], 1.0, nonfinite="skip")
    result = clipper.clip_()
    assert result.skipped
    assert clipper.skipped == 1
    torch.testing.assert_close(local_of(made.grad), before, rtol=0, atol=0, equal_nan=True)


@BOTH
@on_ranks(2)
def test_micro_batches_are_clipped_once_accumulated(clip):
    # transformers #986
    made = nn.Parameter(sharded(torch.zeros(2), mesh_of(2), [S0]))
    for micro_batch in ([3.0, 0.0], [0.0, 4.0]):
        grad = sharded(F(micro_batch), mesh_of(2), [S0])
        made.grad = grad if made.grad is None else made.grad + grad
    assert_norm(CLIPS[clip]([made], 1.0, 2.0), 5.0)
    torch.testing.assert_close(local_of(made.grad), F([(0.6, 0.8)[dist.get_rank()]]))


@BOTH
@on_ranks(2)
def test_unscaled_before_clipping(clip):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    made = nn.Parameter(torch.zeros(2))
    scaler.scale((made * F([0.3, 0.4])).sum()).backward()
    assert made.grad.norm() > 500
    optimizer = torch.optim.SGD([made], lr=1.0)
    scaler.unscale_(optimizer)
    assert_norm(CLIPS[clip]([made], 1.0, 2.0), 0.5)
    torch.testing.assert_close(made.grad, F([0.3, 0.4]))


@on_ranks(2)
def test_a_generator_that_is_used_up_is_never_a_silent_zero():
    # pytorch #148259
    made = parameter(F([3.0, 4.0]))
    generator = iter([made])
    next(generator)
    with recorded() as messages:
        norm = clip_grad_norm_(generator, 1.0)
    assert_norm(norm, 0.0)
    assert messages
    assert any("empty" in message or "no gradient" in message.lower() for message in messages)


@on_ranks(2)
def test_a_generator_is_read_once_and_all_of_it_is_clipped():
    made = [parameter(F([3.0])), parameter(F([4.0]))]
    assert_norm(clip_grad_norm_((one for one in made), 1.0), 5.0)
    assert [round(one.grad.item(), 4) for one in made] == [0.6, 0.8]


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, -math.inf])
@pytest.mark.parametrize("through", ["clip_grad_norm_", "clip_grads_with_norm_", "GradClipper"])
@on_ranks(2)
def test_a_max_norm_that_is_negative_or_nan_is_refused(max_norm, through):
    # pytorch #31367
    made = parameter(F([3.0, 4.0]))
    calls = {
        "clip_grad_norm_": lambda: clip_grad_norm_([made], max_norm),
        "clip_grads_with_norm_": lambda: clip_grads_with_norm_([made], max_norm, F(5.0)),
        "GradClipper": lambda: GradClipper([made], max_norm),
    }
    with count_collectives() as collectives, pytest.raises(ValueError, match="max_norm"):
        calls[through]()
    assert collectives == []
    assert made.grad.tolist() == [3, 4]


@BOTH
@on_ranks(2)
def test_a_sparse_embedding_gradient_is_coalesced_first(clip):
    def embed():
        table = nn.Embedding(4, 2, sparse=True)
        rows = table(F([1, 1]))
        (rows * F([[3.0, 4.0], [3.0, 4.0]])).sum().backward()
        assert not table.weight.grad.is_coalesced()
        return table

    table = embed()
    assert_norm(CLIPS[clip](table, 5.0, 2.0), 10.0)
    assert table.weight.grad.is_sparse
    torch.testing.assert_close(table.weight.grad.to_dense()[1], F([3.0, 4.0]))
    assert_norm(get_total_norm([embed().weight.grad]), 10.0)


@BOTH
@pytest.mark.parametrize("placement", ["shard0", "shard1", "replicate"])
@on_ranks(2)
def test_no_dtensor_operation_is_on_the_path(clip, placement):
    """DTensor's dispatch takes seconds for a thousand parameters (pytorch #169445)."""
    where = {"shard0": S0, "shard1": S1, "replicate": R}[placement]
    made = [parameter(sharded(torch.randn(3, 4), mesh_of(2), [where])) for _ in range(50)]
    with dtensor_operations() as seen:
        made[0].grad * 2
    assert seen == ["aten.mul.Tensor"]
    with dtensor_operations() as seen:
        CLIPS[clip](made, 1.0, 2.0)
    assert seen == []


@BOTH
@on_ranks(2)
def test_time_is_linear_in_the_number_of_dtensor_parameters(clip):
    mesh, local = mesh_of(2), torch.ones(2)
    made = [parameter(labelled(local.clone(), mesh, S0)) for _ in range(6000)]

    def seconds(count):
        start = time.process_time()
        CLIPS[clip](made[:count], 1e9, 2.0)
        return time.process_time() - start

    seconds(100)
    few, many = (min(seconds(count) for _ in range(3)) for count in (1500, 6000))
    assert many < 8 * few + 0.1, (few, many)  # linear is 4, quadratic 16


@on_ranks(2)
def test_the_result_tells_before_and_after_and_whether_it_clipped():
    """ "The logged norm is above max_norm: is it clipped at all?" """
    made = parameter(sharded(F([3.0, 4.0]), mesh_of(2), [S0]))
    clipper = GradClipper([made], 1.0)
    result = clipper.clip_()
    assert result.total_norm.item() == pytest.approx(5.0)
    assert result.clip_coef.item() == pytest.approx(0.2)
    assert float(result.clipped_norm) == pytest.approx(1.0)
    assert result.clipped is True
    again = clipper.clip_()
    assert again.total_norm.item() == pytest.approx(1.0, rel=1e-5)
    clipper.max_norm = 2.0
    third = clipper.clip_()
    assert third.clipped is False
    assert third.clip_coef.item() == 1.0
    assert float(third.clipped_norm) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("norms", ["parameter", "module"])
@on_ranks(2)
def test_norms_per_layer_travel_in_the_same_all_reduce(norms):
    # transformers #31033, Lightning #17512, composer #1501
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    fulls = {"a": F([[3.0], [4.0]]), "b": F([[12.0]])}
    for name, full in fulls.items():
        tensor = Sharded(full, mesh_of(2), (S0,))
        model[name].weight = parameter(tensor.build())
    clipper = GradClipper(model, 1.0, norms=norms)
    with count_collectives() as calls:
        result = clipper.clip_()
    assert_one_all_reduce(calls)
    assert_norm(result.total_norm, 13.0)
    suffix = ".weight" if norms == "parameter" else ""
    assert {name: float(norm) for name, norm in result.norms.items()} == {
        f"a{suffix}": pytest.approx(5.0),
        f"b{suffix}": pytest.approx(12.0),
    }
