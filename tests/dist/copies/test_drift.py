"""check_replicas=: copies compared bit for bit, inside the one all-reduce."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shardclip import GradClipper, ReplicaMismatchError
from tests.ranks import count_collectives, on_ranks, raised_everywhere
from tests.ranks.tensors import local_of, mesh_of, parameter, sharded
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce
from tests.ranks.warned import recorded

R, S0 = Replicate(), Shard(0)


def replicated(numel=5000, seed=0, dtype=torch.float32) -> nn.Parameter:
    full = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return parameter(sharded(full, mesh_of(dist.get_world_size()), [R]))


def flip(tensor: torch.Tensor, index: int, bit: int = 0) -> None:
    bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    bits[index] ^= 1 << bit


def counted(clipper):
    with count_collectives() as calls:
        result = clipper.clip_()
    assert_one_all_reduce(calls)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(4)
def test_one_flipped_bit_on_one_rank_is_found_and_described(dtype):
    first, second = replicated(seed=1, dtype=dtype), replicated(seed=2, dtype=dtype)
    clipper = GradClipper([("a", first), ("b", second)], 1e9, check_replicas=True)
    counted(clipper)
    if dist.get_rank() == 2:
        flip(local_of(second.grad), 4321)
    before = local_of(second.grad).clone()
    said = raised_everywhere(
        clipper.clip_, ReplicaMismatchError, r"b: rank 2 differs from the majority", "1 element"
    )
    assert "number 4321" in said
    assert "a:" not in said
    assert torch.equal(local_of(second.grad), before)


@on_ranks(4)
def test_without_it_a_flipped_bit_passes():
    made = replicated()
    clipper = GradClipper([("a", made)], 1e9)
    if dist.get_rank() == 2:
        flip(local_of(made.grad), 4321)
    counted(clipper)


@on_ranks(2)
def test_a_swapped_pair_is_found():
    """The norm does not see it, nor do the sampled values."""
    made = replicated()
    clipper = GradClipper([("a", made)], 1e9, check_replicas=True)
    if dist.get_rank() == 1:
        local = local_of(made.grad)
        local[[1001, 2002]] = local[[2002, 1001]]
    said = raised_everywhere(clipper.clip_, ReplicaMismatchError, "a: ranks 0, 1 differ")
    assert "2 elements" in said


@on_ranks(4)
def test_hsdp_and_plain_and_partly_replicated_copies():
    mesh = mesh_of(2, 2)
    full = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    hsdp = parameter(sharded(full, mesh, [R, S0]))
    other = parameter(sharded(full, mesh, [S0, R]))
    plain = parameter(full.clone())
    clipper = GradClipper([("h", hsdp), ("o", other), ("p", plain)], 1e9, check_replicas=True)
    for name, made, rank in (("h", hsdp, 3), ("o", other, 1), ("p", plain, 0)):
        counted(clipper)
        if dist.get_rank() == rank:
            flip(local_of(made.grad).view(-1), 3)
        raised_everywhere(clipper.clip_, ReplicaMismatchError, f"{name}: rank")
        if dist.get_rank() == rank:
            flip(local_of(made.grad).view(-1), 3)


@on_ranks(2)
def test_every_so_many_steps():
    made = replicated()
    clipper = GradClipper([("a", made)], 1e9, check_replicas=3)
    outcomes = []
    for step in range(7):
        if dist.get_rank() == 1:
            flip(local_of(made.grad), 10)
        try:
            counted(clipper)
            outcomes.append("passed")
        except ReplicaMismatchError:
            outcomes.append("found")
        if dist.get_rank() == 1:
            flip(local_of(made.grad), 10)
        assert step == len(outcomes) - 1
    assert outcomes == ["found", "passed", "passed", "found", "passed", "passed", "found"]


@on_ranks(2)
def test_a_warning_by_choice():
    made = replicated()
    clipper = GradClipper([("a", made)], 1.0, check_replicas=True, on_drift="warn")
    if dist.get_rank() == 1:
        flip(local_of(made.grad), 10)
    with recorded() as said:
        result = counted_but_for_details(clipper)
    assert any("bit for bit" in text for text in said)
    assert result.clipped
    assert_norm(result.total_norm, float(result.total_norm))


def counted_but_for_details(clipper):
    with count_collectives() as calls:
        result = clipper.clip_()
    assert [call.op for call in calls].count("all_reduce") == 1
    return result


@on_ranks(2)
def test_a_copy_that_a_rank_lacks():
    made, other = replicated(seed=1), replicated(seed=2)
    clipper = GradClipper([("a", made), ("b", other)], 1e9, check_replicas=True)
    if dist.get_rank() == 1:
        other.grad = None
    raised_everywhere(clipper.clip_, ReplicaMismatchError, r"b: on rank 0, but not on rank 1")


@on_ranks(2)
def test_what_is_refused_when_it_is_built():
    made = replicated()
    for wrong in ({"check_replicas": -1}, {"check_replicas": True, "norm_type": float("inf")}):
        with pytest.raises(ValueError, match="check_replicas"):
            GradClipper([("a", made)], 1e9, **wrong)
    with pytest.raises(ValueError, match="on_drift"):
        GradClipper([("a", made)], 1e9, on_drift="ignore")
