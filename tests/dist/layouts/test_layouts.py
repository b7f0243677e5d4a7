"""Every way to lie on meshes: one all-reduce and the unsharded answer."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import Shard

from shardclip import SELF, GradClipper, clip_grad_norm_, get_total_norm, global_norm
from tests.ranks import count_collectives, everywhere, on_ranks
from tests.ranks.tensors import (
    S0,
    S1,
    R,
    Sharded,
    exact_norm,
    labelled,
    mesh_of,
    parameter,
    sharded,
    strided,
)
from tests.ranks.unsharded import (
    CLIPS,
    assert_clips_as_unsharded,
    assert_norm,
    assert_one_all_reduce,
)

BOTH = pytest.mark.parametrize("clip", CLIPS)
POWERS = pytest.mark.parametrize("norm_type", [0.0, 0.5, 1.0, 2.0, 3.0, math.inf])

LAYOUTS = {
    "shard": ((4,), (S0,)),
    "shard of another dim": ((4,), (S1,)),
    "replicate": ((4,), (R,)),
    "hsdp": ((2, 2), (R, S0)),
    "hsdp reversed": ((2, 2), (S0, R)),
    "both axes on one dim": ((2, 2), (S0, S0)),
    "two dims": ((2, 2), (S0, S1)),
    "all replicated": ((2, 2), (R, R)),
    "fsdp over colwise tp": ((2, 2), (strided(0, 2), S0)),
    "fsdp over rowwise tp": ((2, 2), (S0, S1)),
    "three axes": ((1, 2, 2), (R, S0, R)),
    "hsdp over tp": ((2, 1, 2), (R, strided(0, 2), S0)),
    "negative dim": ((4,), (Shard(-1),)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@POWERS
@BOTH
@on_ranks(4)
def test_even_layouts(layout, norm_type, clip):
    shape, placements = LAYOUTS[layout]
    tensors = [Sharded(torch.randn(8, 4), mesh_of(*shape), placements) for _ in range(2)]
    assert_clips_as_unsharded(tensors, norm_type, CLIPS[clip])


@pytest.mark.parametrize("size", [(0, 4), (1, 1), (3, 5), (5, 3), (7, 2), (13, 4), (3, 0)])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "negative dim"])
@on_ranks(4)
def test_uneven_and_empty_layouts(layout, size):
    shape, placements = LAYOUTS[layout]
    one = Sharded(torch.randn(size), mesh_of(*shape), placements)
    another = Sharded(torch.randn(8, 4), mesh_of(*shape), placements)
    for norm_type in (1.0, 2.0, math.inf):
        assert_clips_as_unsharded([one, another], norm_type)


@POWERS
@BOTH
@on_ranks(4)
def test_many_meshes_in_one_call(norm_type, clip):
    tensors = [
        Sharded(torch.randn(5, 3), mesh_of(4), (S0,)),
        Sharded(torch.randn(6, 4), mesh_of(2, 2), (S0, S1)),
        Sharded(torch.randn(6, 4), mesh_of(2, 2), (R, S0)),
        Sharded(torch.randn(3), mesh_of(2, 1, 2), (R, R, S0)),
        Sharded(torch.randn(8, 2), mesh_of(2, 2), (strided(0, 2), S0)),
        Sharded(torch.randn(4, 4)),
        Sharded(torch.tensor(2.5)),
    ]
    assert_clips_as_unsharded(tensors, norm_type, CLIPS[clip])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 4097, 100_003])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@on_ranks(4)
def test_replicas_share_the_reading_whatever_the_size(size, norm_type):
    """R replicas split a tensor; sizes that R does not divide lose nothing."""
    assert_clips_as_unsharded([Sharded(torch.randn(size), mesh_of(4), (R,))], norm_type)
    assert_clips_as_unsharded([Sharded(torch.randn(size, 2), mesh_of(2, 2), (R, S1))], norm_type)


@BOTH
@on_ranks(4)
def test_views_that_are_not_contiguous(clip):
    base = torch.randn(6, 8)
    grads = [base.t(), base[:, ::2], base[::2].t().contiguous().t()]
    expected = exact_norm(grads)
    made = [parameter(grad.clone(memory_format=torch.preserve_format)) for grad in grads]
    made[1].grad = torch.as_strided(made[1].grad, (6, 4), (4, 1))
    for one, grad in zip(made, grads, strict=True):
        one.grad = grad.clone().expand_as(grad) if grad is not grads[1] else base.clone()[:, ::2]
    assert not made[1].grad.is_contiguous()
    assert_norm(CLIPS[clip](made, expected / 2, 2.0), expected)
    for one, grad in zip(made, grads, strict=True):
        torch.testing.assert_close(one.grad, grad / 2, rtol=1e-5, atol=0)


@on_ranks(4)
def test_the_payload_does_not_depend_on_what_a_rank_holds():
    """Other parameters, none, other sizes, other dtypes, other steps: the same lanes."""
    mesh, rank = mesh_of(4), dist.get_rank()
    given = {
        "many": [labelled(torch.randn(3), mesh, S0) for _ in range(7 * rank)],
        "one": [labelled(torch.randn(rank, 2, dtype=torch.float64), mesh, S0)],
        "plain": [torch.ones(3), torch.ones(5)],
        "empty shards": [labelled(torch.ones(rank // 3), mesh, S0)],
    }
    sizes = set()
    for tensors in given.values():
        made = [parameter(tensor) for tensor in tensors]
        with count_collectives() as calls:
            clip_grad_norm_(made, 1.0)
        assert_one_all_reduce(calls)
        sizes.add(calls[0].numel)
    assert len(sizes) == 1


@on_ranks(4)
def test_ranks_with_other_parameters_have_a_clipper_with_one_payload():
    mesh, rank = mesh_of(4), dist.get_rank()
    made = [parameter(labelled(torch.ones(2), mesh, S0)) for _ in range(2 * rank)]
    clipper = GradClipper(made, 1.0)
    sizes = set()
    for step in range(4):
        for one in made[: step if rank == 2 else 0]:
            one.grad = None
        with count_collectives() as calls:
            norm = clipper.clip_().total_norm
        assert_one_all_reduce(calls)
        sizes.add(calls[0].numel)
        assert norm.item() > 0
    assert len(sizes) == 1


@on_ranks(2)
def test_group_self_is_this_rank_alone():
    mine = torch.tensor([[3.0, 4.0], [5.0, 12.0]][dist.get_rank()])
    made = parameter(mine)
    with count_collectives() as calls:
        norm = clip_grad_norm_([made], 1.0, group=SELF)
        total = get_total_norm([mine], group=SELF)
    assert calls == []
    assert everywhere(round(norm.item(), 5)) == [5, 13]
    assert total.item() == pytest.approx(1.0)
    assert GradClipper([made], 0.5, group=SELF).clip_().total_norm.item() == pytest.approx(1.0)
    assert made.grad.norm().item() == pytest.approx(0.5, rel=1e-5)


@on_ranks(2)
def test_group_self_on_one_rank_only():
    """A model that lives on one rank of a larger job: the other rank does not call."""
    if dist.get_rank() == 1:
        assert global_norm([torch.tensor([3.0, 4.0])], group=SELF).item() == 5


@on_ranks(4)
def test_a_group_of_some_ranks():
    group = dist.new_group([1, 3])
    rank = dist.get_rank()
    if rank in (1, 3):
        made = parameter(torch.tensor([3.0, 4.0]))
        with count_collectives() as calls:
            norm = clip_grad_norm_([made], 1.0, group=group)
        assert [call.op for call in calls] == ["all_reduce"]
        assert norm.item() == pytest.approx(5.0)
        torch.testing.assert_close(made.grad, torch.tensor([0.6, 0.8]))
    dist.barrier()


@pytest.mark.parametrize("kind", ["plain", "inside a DTensor"])
@on_ranks(2)
def test_asynchronous_results_are_waited_for(kind):
    group = dist.group.WORLD
    pending = functional.all_reduce(torch.tensor([1.5, 2.0]), "sum", group)
    assert type(pending).__name__ == "AsyncCollectiveTensor"
    tensor = pending if kind == "plain" else labelled(pending, mesh_of(2), R)
    assert_norm(get_total_norm([tensor]), 5.0)


@on_ranks(2)
def test_foreach_changes_nothing():
    for foreach in (None, True, False):
        made = parameter(sharded(torch.tensor([3.0, 4.0]), mesh_of(2), [S0]))
        assert_norm(clip_grad_norm_([made], 1.0, 2.0, False, foreach), 5.0)
        assert_norm(get_total_norm([made.grad], 2.0, False, foreach), 1.0, rtol=1e-5)


@pytest.mark.parametrize("norm_type", ["inf", math.inf, 2, "2"])
@on_ranks(2)
def test_norm_type_is_read_as_torch_reads_it(norm_type):
    made = parameter(sharded(torch.tensor([3.0, 4.0]), mesh_of(2), [S0]))
    expected = 4.0 if float(norm_type) == math.inf else 5.0
    assert_norm(clip_grad_norm_([made], 10.0, norm_type), expected)


@on_ranks(2)
def test_a_single_tensor_and_a_module_may_be_given():
    made = parameter(torch.tensor([3.0, 4.0]))
    assert_norm(clip_grad_norm_(made, 10.0), 5.0)
    assert_norm(get_total_norm(made.grad), 5.0)
    module = torch.nn.ParameterDict({"weight": made})
    assert_norm(clip_grad_norm_(module, 10.0), 5.0)


@on_ranks(4)
def test_nothing_is_multiplied_below_the_threshold():
    """A coefficient of one leaves every bit, the subnormal and the negative zero."""
    full = torch.tensor([1e-40, -0.0, 0.1, -3.7])
    made = parameter(sharded(full, mesh_of(4), [S0]))
    clip_grad_norm_([made], 100.0)
    mine = full[dist.get_rank()]
    assert made.grad.to_local().view(torch.int32).item() == mine.view(torch.int32).item()
