"""Counting what a call sends over the wire, inside a rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"}
LOCAL_OPS = {"wait_tensor", "_wrap_tensor_autograd"}


@dataclass(frozen=True)
class Collective:
    """One operation that communicates: its name, elements and payload's dtype."""

    op: str
    numel: int
    dtype: torch.dtype | None = None


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Collective]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # A DTensor's operation comes back here as the collectives on local tensors that it makes.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if func.namespace in NAMESPACES and name not in LOCAL_OPS:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            numel = sum(tensor.numel() for tensor in tensors)
            dtype = tensors[0].dtype if tensors else None
            self.calls.append(Collective(_spelled(name), numel, dtype))
        return func(*args, **(kwargs or {}))


def _spelled(name: str) -> str:
    name = name.strip("_")
    return {"allreduce": "all_reduce", "allgather": "all_gather"}.get(name, name)


def _sequence_numbers() -> dict[str, int]:
    """What each group's backend itself has counted."""
    groups = [group for group, (backend, _) in c10d._world.pg_map.items() if backend != "fake"]
    return {
        group.group_name: group._get_sequence_number_for_group()
        for group in groups
        if group is not dist.GroupMember.NON_GROUP_MEMBER
    }


@contextmanager
def count_collectives() -> Iterator[list[Collective]]:
    """Record every collective and point-to-point operation of the block, also functional ones.

    The backends' own counters are read as well: a collective that never passed torch's dispatcher
    shows up as `unseen`, and a new process group as `new_group`.
    """
    calls: list[Collective] = []
    before = _sequence_numbers()
    with _Recorder(calls):
        yield calls
    after = _sequence_numbers()
    counted = sum(number - before.get(name, 0) for name, number in after.items())
    collectives = [call for call in calls if "send" not in call.op and "recv" not in call.op]
    calls += [Collective("unseen", 0)] * (counted - len(collectives))
    calls += [Collective("new_group", 0)] * (len(after) - len(before))


class _DTensorRecorder(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            self.seen.append(str(func))
            return NotImplemented
        return func(*args, **(kwargs or {}))


@contextmanager
def dtensor_operations() -> Iterator[list[str]]:
    """Record the block's operations on DTensors, whose dispatch is slow."""
    seen: list[str] = []
    with _DTensorRecorder(seen):
        yield seen
