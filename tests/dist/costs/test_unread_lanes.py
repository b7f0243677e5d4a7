"""The path of CUDA, taken on CPU: the lanes are not read in the same step, and nothing syncs."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardclip import (
    AdaptiveGradClipper,
    GradClipper,
    PerTensorClipper,
    ReplicaMismatchError,
    clip_grad_norm_,
    kernels,
)
from shardclip.kernels import foreach
from shardclip.step import measure, single
from tests.ranks import count_collectives, on_ranks, raised_everywhere
from tests.ranks.tensors import S0, local_of, mesh_of, parameter, sharded

FULL = torch.tensor([3.0, 4.0, 0.0, 12.0])


class _HostReads(TorchDispatchMode):
    """Counts what would wait for a device."""

    NAMES = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "masked_select")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in self.NAMES
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_device():
    """Let reads cost something, and take the kernel that a device takes."""
    patch = pytest.MonkeyPatch()
    patch.setattr(measure, "reads_are_free", lambda device: False)
    patch.setattr(kernels.blocked, "PowerSums", foreach.PowerSums)
    try:
        yield
    finally:
        patch.undo()
        single._pending.clear()


def sharded_parameter():
    return parameter(sharded(FULL, mesh_of(2), [S0]))


@on_ranks(2)
def test_the_function_reads_nothing_where_nothing_is_to_be_proved():
    made = sharded_parameter()
    with as_on_a_device(), _HostReads() as reads, count_collectives() as calls:
        total = clip_grad_norm_([made], 6.5)
    assert reads.count == 0
    assert [call.op for call in calls] == ["all_reduce"]
    assert float(total) == 13
    expected = FULL.chunk(2)[dist.get_rank()] * 0.5
    torch.testing.assert_close(local_of(made.grad), expected)


@on_ranks(2)
def test_a_clipper_reads_in_its_first_step_alone():
    made, copied = sharded_parameter(), parameter(torch.ones(3))
    with as_on_a_device():
        clipper = GradClipper([("w", made), ("b", copied)], 1.0)
        counts = []
        for _ in range(3):
            with _HostReads() as reads:
                result = clipper.clip_()
            counts.append(reads.count)
        # Afterwards only the flag of the step before is read, from its copy on the host.
        assert counts[0] > 0
        assert counts[1:] == [0, 1]
        assert result.clipped_norm == pytest.approx(1.0, rel=1e-5)


@on_ranks(2)
def test_a_later_mismatch_leaves_the_gradients_and_is_raised_by_the_next_call():
    made = parameter(torch.ones(3))
    with as_on_a_device():
        clipper = GradClipper([("odd.weight", made)], 1.0)
        clipper.clip_()
        made.grad = torch.ones(3) * (1 + dist.get_rank())
        with _HostReads() as reads:
            result = clipper.clip_()
        assert reads.count == 0
        assert result.total_norm.isnan()
        assert made.grad.tolist() == [1.0 + dist.get_rank()] * 3
        raised_everywhere(clipper.clip_, ReplicaMismatchError, "odd.weight")


@pytest.mark.parametrize("wrong", ["meta", "copy"])
@on_ranks(2)
def test_one_rank_that_reads_waits_with_its_error_for_the_others(wrong):
    """What is wrong on rank 1 is known there at once; all ranks raise it in the next call."""
    made, copied = sharded_parameter(), parameter(torch.ones(2))
    kind = ValueError if wrong == "meta" else ReplicaMismatchError
    wrongly: dict[torch.Tensor, torch.Tensor] = {}
    with as_on_a_device():
        named = [("w", made), ("copied", copied)]
        clipper = GradClipper(named, 1.0, grad=lambda p: wrongly.get(p, p.grad))
        clipper.clip_()
        if dist.get_rank() == 1:
            bad = {"meta": torch.ones(2, device="meta"), "copy": torch.ones(2).double() * 5}
            wrongly[copied] = bad[wrong]
        before = local_of(made.grad).clone()
        assert clipper.clip_().total_norm.isnan()
        assert local_of(made.grad).equal(before)
        raised_everywhere(clipper.clip_, kind, "copied", r"rank 1|ranks 0, 1")


@on_ranks(2)
@pytest.mark.parametrize("by", ["function", "clipper", "tensor by tensor", "unit by unit"])
def test_memory_that_is_shared_in_a_later_step_raises_in_the_next_call(by):
    made = sharded_parameter()
    with as_on_a_device():
        named = [("w", made)]
        call = {
            "function": lambda: lambda: clip_grad_norm_([made], 1e9),
            "clipper": lambda: GradClipper(named, 1e9).clip_,
            "tensor by tensor": lambda: PerTensorClipper(named, 1e9).clip_,
            "unit by unit": lambda: AdaptiveGradClipper(named, 1e9).clip_,
        }[by]()
        for _ in range(4):
            made.grad = sharded(FULL, mesh_of(2), [S0])
            call()
        if dist.get_rank():
            expanded = torch.ones(1).expand(2)  # of the same kind, so that nothing is planned anew
            made.grad = DTensor(expanded, made.grad._spec, requires_grad=False)
        call()
        raised_everywhere(call, ValueError, "share memory", "rank 1")
