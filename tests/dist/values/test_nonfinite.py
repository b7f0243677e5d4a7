"""Non-finite gradients by name, rank, kind, number and place; and too many skips in a row."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardclip import GradClipper, NonFiniteGradientError
from tests.ranks import count_collectives, on_ranks, raised_everywhere
from tests.ranks.clippers import counted, here, shard
from tests.ranks.tensors import local_of, mesh_of, parameter, sharded
from tests.ranks.warned import recorded

CPU = torch.device("cpu")
R, S0, S1 = Replicate(), Shard(0), Shard(1)
STRIDED = _StridedShard(0, split_factor=2)
PLACEMENTS = [(S0, S1), (S1, S0), (S0, S0), (STRIDED, S0), (R, S0), (S1, R)]


def spoiled(mesh, placements, shape, at) -> torch.nn.Parameter:
    """A parameter whose whole gradient has these values at these places."""
    full = torch.ones(shape)
    for index, value in at.items():
        full[index] = value
    return parameter(sharded(full, mesh, placements))


@on_ranks(4)
@pytest.mark.parametrize(
    "placements",
    [(S0, S1), (S1, S0), (S0, S0), (_StridedShard(0, split_factor=2), S0), (R, S0), (S1, R)],
)
def test_the_place_is_that_in_the_whole_parameter(placements):
    mesh = mesh_of(2, 2)
    at = {(5, 6): math.nan, (6, 1): math.inf, (7, 7): -math.inf}
    bad = spoiled(mesh, placements, (8, 8), at)
    good = spoiled(mesh, placements, (8, 8), {})
    clipper = GradClipper([("fine", good), ("layers.3.weight", bad)], 1.0, nonfinite="raise")
    before = local_of(bad.grad).clone()
    said = raised_everywhere(clipper.clip_, NonFiniteGradientError, r"layers\.3\.weight \(rank")
    assert "1 NaN, 2 infinite, first at [5, 6]" in said
    assert "fine" not in said
    torch.testing.assert_close(local_of(bad.grad), before, equal_nan=True, rtol=0, atol=0)


@on_ranks(4)
def test_uneven_shards_on_two_ranks():
    bad = spoiled(mesh_of(4), [S0], (7,), {3: math.inf, 6: math.inf})
    clipper = GradClipper([("w", bad)], 1.0, nonfinite="skip")
    with count_collectives() as calls:
        result = clipper.clip_()
    assert [call.op for call in calls].count("all_reduce") == 1
    (found,) = result.nonfinite
    assert (found.name, found.ranks, found.nan, found.infinite) == ("w", (1, 3), 0, 2)
    assert found.first == (3,)
    assert result.nonfinite_parameters == ("w",)
    assert result.skipped


class _Weighted(nn.Module):
    """Its gradients are 1, 2, 3, ... in their order: each element tells its index."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(5, 7))
        self.b = nn.Parameter(torch.zeros(3, 2, 4))

    def forward(self, x):
        held = (self.a, self.b)
        return sum((p * torch.arange(1.0, p.numel() + 1).view(p.shape)).sum() for p in held) * x


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("original", [True, False])
@on_ranks(2)
def test_the_place_in_a_parameter_that_fsdp1_has_cut(original, strategy):
    with recorded():  # torch warns of FSDP1
        model = FullyShardedDataParallel(
            _Weighted(), use_orig_params=original, sharding_strategy=strategy, device_id=CPU
        )
    clipper = GradClipper(model, 1.0, nonfinite="skip")
    for number, element in ((1, 1), (1, 24), (0, 3), (0, 19), (0, 35)):
        model.zero_grad()
        model(torch.ones(())).backward()
        flat = model._handle.flat_param
        spans = [source.span for source in clipper._collector.sources]
        found = flat._params[number].grad if original else flat.grad.view(-1)[slice(*spans[number])]
        if found is not None:
            found[found == element] = math.nan
        (told,) = clipper.clip_().nonfinite
        whole = (5, 7) if number == 0 else (3, 2, 4)
        assert told.name == "ab"[number]
        assert told.first == tuple(map(int, torch.unravel_index(torch.tensor(element - 1), whole)))
        assert told.part_of is None


@on_ranks(2)
def test_the_place_in_a_sparse_gradient():
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([7, 2, 7])).sum().backward()
    table.weight.grad._values()[2, 1] = math.nan
    (found,) = GradClipper(table, 1.0, nonfinite="skip").clip_().nonfinite
    assert (found.first, found.part_of) == ((7, 1), None)


@on_ranks(2)
def test_the_place_in_a_plain_shard_is_told_with_its_rank():
    made = parameter(torch.tensor(here([1.0, 1.0, math.nan], [math.inf, 1.0])))
    clipper = GradClipper([("w", made)], 1.0, layout=(mesh_of(2), [S0]), nonfinite="raise")
    said = raised_everywhere(clipper.clip_, NonFiniteGradientError, "1 NaN, 1 infinite")
    assert "first at [2] of rank 0's part" in said


@pytest.mark.parametrize("p", [2.0, math.inf])
@on_ranks(2)
def test_copies_that_a_layout_declares_have_their_own_places(p):
    made = parameter(torch.tensor([[1.0, math.nan], [2.0, 3.0]]))
    clipper = GradClipper([("w", made)], 1.0, p, layout=(mesh_of(2), [R]), nonfinite="skip")
    (found,) = clipper.clip_().nonfinite
    assert (found.first, found.part_of) == ((0, 1), None)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@on_ranks(2)
def test_copies_are_counted_once(p):
    bad = parameter(torch.tensor([1.0, math.nan, 2.0]))
    clipper = GradClipper([("w", bad)], 1.0, p, nonfinite="skip")
    (found,) = clipper.clip_().nonfinite
    assert (found.ranks, found.nan, found.first) == ((0, 1), 1, (1,))


@on_ranks(2)
def test_the_usual_step_gathers_nothing():
    clipper = GradClipper([("w", shard([3.0, 4.0]))], 1.0, nonfinite="skip")
    assert counted(clipper).nonfinite == ()


@on_ranks(2)
def test_too_many_skips_in_a_row_raise_on_all_ranks():
    made = shard([3.0, 4.0])
    clipper = GradClipper([("w", made)], 1.0, nonfinite="skip", max_consecutive_skips=3)
    good = local_of(made.grad).clone()

    def step(spoil):
        local_of(made.grad).copy_(good)
        if spoil and dist.get_rank() == 1:
            local_of(made.grad)[0] = math.nan
        return clipper.clip_()

    for spoil in (True, True, False, True, True):
        assert step(spoil).skipped is spoil
    assert (clipper.skipped, clipper.consecutive_skips) == (4, 2)
    raised_everywhere(lambda: step(True), NonFiniteGradientError, "3 steps in a row", "learning")
    assert clipper.consecutive_skips == 0
    assert not step(False).skipped  # whoever goes on has mended something


@on_ranks(2)
def test_a_fused_step_that_skips_on_the_device_counts_too():
    made = shard([3.0, 4.0])
    optimizer = torch.optim.AdamW([made], lr=0.1, fused=True)
    clipper = GradClipper([("w", made)], 1.0, nonfinite="skip", max_consecutive_skips=2)
    if dist.get_rank() == 1:
        local_of(made.grad)[0] = math.nan
    assert clipper.step(optimizer).skipped
    raised_everywhere(lambda: clipper.step(optimizer), NonFiniteGradientError, "2 steps in a row")


def test_a_number_below_one_is_refused():
    with pytest.raises(ValueError, match="max_consecutive_skips"):
        GradClipper([torch.nn.Parameter(torch.ones(1))], 1.0, max_consecutive_skips=0)
