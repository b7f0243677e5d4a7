"""GradClipper: groups, sums, and steps that follow one another."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardclip import GradClipper
from tests.ranks import count_collectives, everywhere, on_ranks, raised_everywhere
from tests.ranks.clippers import counted, here, shard, weights
from tests.ranks.tensors import S0, labelled, local_of, mesh_of, parameter, sharded
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce

F = torch.tensor


@pytest.mark.parametrize("form", ["tensors", "pairs", "optimizer", "named optimizer"])
@on_ranks(2)
def test_groups_are_clipped_each_by_its_own_norm_in_one_all_reduce(form):
    made = weights()
    named = [(f"layer{i}", one) for i, one in enumerate(made)]
    members = named if form in ("pairs", "named optimizer") else made
    groups = [
        {"params": members[:1], "max_norm": 1.0},
        {"params": members[1:2], "max_norm": None},
        {"params": members[2:]},
    ]
    if "optimizer" in form:
        groups = torch.optim.SGD(groups, lr=0.1).param_groups
    result = counted(GradClipper(groups, 8.5))
    assert_norm(result.total_norm, math.sqrt(25 + 169 + 289))
    assert [float(norm) for norm in result.group_norms] == pytest.approx([5, 13, 17])
    assert [float(coef) for coef in result.group_coefs] == pytest.approx([0.2, 1.0, 0.5])
    assert float(result.clipped_norm) == pytest.approx(math.sqrt(1 + 169 + 8.5**2), rel=1e-5)
    assert [local_of(one.grad).item() for one in made] == pytest.approx(
        here([0.6, 5.0, 4.0], [0.8, 12.0, 7.5])
    )


@pytest.mark.parametrize("norm_type", [0.0, 1.0, math.inf])
@on_ranks(2)
def test_groups_with_other_norms(norm_type):
    made = weights()
    groups = [{"params": made[:1]}, {"params": made[1:]}]
    result = counted(GradClipper(groups, 1e9, norm_type))
    expected = {0.0: [2, 4, 6], 1.0: [7, 40, 47], math.inf: [4, 15, 15]}[norm_type]
    assert [*map(float, result.group_norms), result.total_norm.item()] == pytest.approx(expected)


@on_ranks(2)
def test_a_non_finite_group_leaves_the_other_groups_alone():
    """Each group is clipped by its own norm, so one group's NaN is not another's."""
    made = [shard([math.nan, 1.0]), shard([3.0, 4.0])]
    groups = [{"params": [one], "max_norm": 1.0} for one in made]
    result = counted(GradClipper(groups, 1.0))
    assert math.isnan(float(result.group_norms[0]))
    assert float(result.group_norms[1]) == pytest.approx(5.0)
    assert not result.finite
    assert local_of(made[0].grad).isnan().all()
    assert local_of(made[1].grad).item() == pytest.approx(here(0.6, 0.8))


@on_ranks(2)
def test_sums_travel_in_the_same_all_reduce():
    clipper = GradClipper([shard([3.0, 4.0])], 1.0, also=("loss", "tokens", "stop"))
    sizes = set()
    steps = [
        {"loss": F(1.5), "tokens": here(7, 11), "stop": 0.0},
        {"loss": F(0.25, dtype=torch.float64)},
        here({"stop": 1.0}, None),
        None,
    ]
    expected = [(3.0, 18.0, 0.0), (0.5, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0)]
    for also, sums in zip(steps, expected, strict=True):
        with count_collectives() as calls:
            result = clipper.clip_(also)
        assert_one_all_reduce(calls)
        sizes.add(calls[0].numel)
        assert tuple(float(result.sums[name]) for name in ("loss", "tokens", "stop")) == sums
    assert len(sizes) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@on_ranks(2)
def test_a_loss_that_is_not_finite_is_not_the_gradients_fault(bad):
    made = shard([3.0, 4.0])
    clipper = GradClipper([made], 1.0, also=("loss",), nonfinite="raise")
    result = counted(clipper, {"loss": here(bad, 1.0)})
    assert not math.isfinite(float(result.sums["loss"]))
    assert result.finite
    assert_norm(result.total_norm, 5.0)
    assert local_of(made.grad).item() == pytest.approx(here(0.6, 0.8))


@on_ranks(2)
def test_sums_come_back_from_a_skipped_step():
    made = shard([3.0, math.nan])
    clipper = GradClipper([made], 1.0, also=("loss",), nonfinite="skip")
    result = clipper.step(torch.optim.SGD([made], lr=1.0), also={"loss": 2.0})
    assert result.skipped
    assert float(result.sums["loss"]) == 4.0


@on_ranks(2)
def test_an_undeclared_sum_is_refused():
    clipper = GradClipper([shard([3.0, 4.0])], 1.0, also=("loss",))
    raised_everywhere(lambda: clipper.clip_({"losss": 1.0}), (ValueError, KeyError), "losss")
    assert_norm(clipper.clip_({"loss": 1.0}).total_norm, 5.0)


@on_ranks(2)
def test_gradients_that_are_kept_elsewhere():
    made = shard([100.0, 100.0])
    made.main_grad = sharded(F([3.0, 4.0]), mesh_of(2), [S0])
    result = counted(GradClipper([made], 1.0, grad=lambda one: one.main_grad))
    assert_norm(result.total_norm, 5.0)
    assert local_of(made.main_grad).item() == pytest.approx(here(0.6, 0.8))
    assert local_of(made.grad).item() == 100.0


@on_ranks(2)
def test_gradients_that_are_kept_elsewhere_in_another_dtype():
    made = nn.Parameter(F([1.0, 1.0]).bfloat16())
    made.main_grad = F([3.0, 4.0])
    clipper = GradClipper([("weight", made)], 1.0, grad=lambda one: one.main_grad)
    assert_norm(counted(clipper).total_norm, 5.0)
    torch.testing.assert_close(made.main_grad, F([0.6, 0.8]))


OPTIMIZERS = {
    "SGD": lambda one: torch.optim.SGD(one, lr=0.1, momentum=0.9),
    "AdamW": lambda one: torch.optim.AdamW(one, lr=0.1),
    "AdamW fused": lambda one: torch.optim.AdamW(one, lr=0.1, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2)
def test_steps_as_torch_does_on_the_unsharded_parameters(optimizer):
    """Four steps of which the second is below the threshold; zero_grad sets to None between."""
    grads = [torch.randn(6) * scale for scale in (3.0, 0.01, 2.0, 5.0)]
    whole = nn.Parameter(torch.ones(6))
    made = nn.Parameter(sharded(torch.ones(6), mesh_of(2), [S0]))
    theirs, ours = OPTIMIZERS[optimizer]([whole]), OPTIMIZERS[optimizer]([made])
    clipper = GradClipper([made], 1.0)
    clipped = []
    for grad in grads:
        whole.grad, made.grad = grad.clone(), sharded(grad, mesh_of(2), [S0])
        expected = nn.utils.clip_grad_norm_([whole], 1.0)
        theirs.step()
        result = clipper.step(ours)
        assert_norm(result.total_norm, expected.item())
        clipped.append(result.clipped)
        ours.zero_grad()
    assert clipped == [True, False, True, True]
    mine = slice(0, 3) if dist.get_rank() == 0 else slice(3, 6)
    torch.testing.assert_close(local_of(made.data), whole.data[mine], rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_max_norm_may_be_changed_between_steps():
    made = shard([3.0, 4.0])
    clipper = GradClipper([made], 10.0)
    assert not counted(clipper).clipped
    clipper.max_norm = 2.5
    assert counted(clipper).clip_coef.item() == pytest.approx(0.5)
    assert local_of(made.grad).item() == pytest.approx(here(1.5, 2.0))
    clipper.max_norm = None
    assert counted(clipper).clip_coef.item() == 1.0
    clipper.max_norm = 0.0
    counted(clipper)
    assert local_of(made.grad).item() == 0.0
    clipper.max_norm = -1.0
    with count_collectives() as calls, pytest.raises(ValueError, match="max_norm"):
        clipper.clip_()
    assert calls == []


@on_ranks(2)
def test_the_set_of_gradients_may_change_between_steps():
    """Some vanish, on one rank or on all, come back, turn plain; the payload stays."""
    sets = [
        (True, True, True),
        (True, False, True),
        here((True, True, True), (False, False, False)),
        (False, True, False),
        (False, False, True),
        (True, True, True),
    ]
    fulls = ([3.0, 4.0], [5.0, 12.0], [8.0, 15.0])
    made = weights()
    clipper = GradClipper(made, 1.0, norms="parameter")
    sizes = set()
    for present in sets:
        for one, full, there in zip(made, fulls, present, strict=True):
            one.grad = sharded(F(full), mesh_of(2), [S0]) if there else None
        mine = [full[dist.get_rank()] for full, there in zip(fulls, present, strict=True) if there]
        expected = math.hypot(*(value for values in everywhere(mine) for value in values))
        with count_collectives() as calls:
            result = clipper.clip_()
        assert_one_all_reduce(calls)
        sizes.add(calls[0].numel)
        assert_norm(result.total_norm, expected)
        now = [local_of(one.grad).item() for one in made if one.grad is not None]
        assert now == pytest.approx([value / expected for value in mine])
    assert len(sizes) == 1


@on_ranks(2)
def test_a_gradient_that_changes_its_layout_is_planned_anew():
    """Sharded, replicated, plain, in another dtype: what counts is what it is now."""
    made = nn.Parameter(sharded(torch.zeros(2), mesh_of(2), [S0]))
    clipper = GradClipper([made], 1e9, grad=lambda one: one.now)
    full = F([3.0, 4.0])
    for now in (
        sharded(full, mesh_of(2), [S0]),
        full,
        labelled(full, mesh_of(2), torch.distributed.tensor.Replicate()),
        full.double(),
        sharded(full, mesh_of(2), [S0]),
        sharded(full, mesh_of(1, 2), [S0, S0]),
    ):
        made.now = now
        norm = counted(clipper).total_norm
        assert_norm(norm, 5.0)
        assert norm.dtype == (torch.float64 if now.dtype == torch.float64 else torch.float32)


@on_ranks(4)
def test_a_clipper_of_some_ranks_is_built_by_those():
    group = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        made = parameter(F([3.0, 4.0]))
        clipper = GradClipper([("w", made)], 1.0, group=group)
        with count_collectives() as calls:
            norms = [clipper.clip_().total_norm.item() for _ in range(2)]
        assert [call.op for call in calls] == ["all_reduce"] * 2
        assert norms == pytest.approx([5.0, 1.0], rel=1e-5)
    dist.barrier()
