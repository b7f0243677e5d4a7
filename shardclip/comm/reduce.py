"""The only file that calls a collective."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardclip import compat

from . import messages, missing_ranks
from .world import World


class _Self:
    """The type of SELF."""

    def __repr__(self) -> str:
        return "shardclip.SELF"


SELF: Final = _Self()
"""For ``group=``: this rank alone, for a model that lives on one rank of a larger job."""

Group = Any
"""A process group, a one-axis DeviceMesh, ``SELF``, or None for the whole world."""


def resolve(group: Group) -> World:
    """Find the ranks and the device of a group.

    Raises:
        ValueError: This rank is not in the group.
        TypeError: It is no group.
    """
    if group is SELF:
        rank = dist.get_rank() if _begun() else 0
        return World((rank,), rank)
    if not _begun():
        return World((0,), 0, holds=_alone)
    rank = dist.get_rank()
    if group is None:
        group = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group=: rank {rank} is not in it; only its members may call")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group= must be a ProcessGroup, a one-axis DeviceMesh, SELF or None, got {group!r}"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    lasts = partial(_lasts, weakref.ref(group))
    if len(ranks) == 1:
        return World(ranks, rank, holds=_alone if group is dist.group.WORLD else lasts)
    return World(ranks, rank, group, _payload_device(group), lasts)


def _begun() -> bool:
    return dist.is_available() and dist.is_initialized()


def _alone() -> bool:
    """Whether this process is a job of its own, as it was when this was first asked."""
    return not _begun() or dist.get_world_size() == 1


def _lasts(group: Any) -> bool:
    """Whether a process group, held weakly, was not destroyed."""
    alive = group()
    return alive is not None and compat.is_registered(alive)


def _check(world: World) -> None:
    """Refuse ranks that are no longer those that were meant.

    Raises:
        RuntimeError: Says what has happened and what to do.
    """
    if world.holds():
        return
    if world.holds is _alone:
        raise RuntimeError(
            "this clipper was built while its process was alone, before init_process_group: every "
            f"rank of the {dist.get_world_size()} would clip by a norm of its own. Build it after "
            "init_process_group; or, if that is meant, with group=shardclip.SELF"
        )
    raise RuntimeError(
        "the process group that this clipper was built for has been destroyed, and a new one does "
        "not take its place. Build the clipper again, after init_process_group"
    )


def _payload_device(process_group: Any) -> torch.device:
    """Prefer the accelerator: moving the small payload there beats a second backend."""
    kind = compat.group_accelerator(process_group)
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


_NORM = "the all-reduce of the gradients' norm"
_DETAILS = "what ranks exchange while a GradClipper is built, or about an error,"


class Work:
    """An all-reduce under way; nothing to wait for where a rank is alone."""

    def __init__(self, work: Any, world: World) -> None:
        self._work = work
        self._world = world

    def wait(self) -> None:
        """Return when the payload is combined; on CUDA let the current stream wait for it.

        Raises:
            RuntimeError: The group's time-out has passed, or the connection is lost: names the
                ranks that did not take part.
        """
        work, self._work = self._work, None
        if work is None:
            return
        with _explained(self._world, _NORM):
            work.wait()


def all_reduce(payload: Tensor, world: World, *, maximum: bool = False) -> Work:
    """Start to combine the ranks' payloads, in place, on the payload's device. One all-reduce.

    Args:
        payload: float64 of the same shape on every rank.
        world: Who takes part; nothing happens where a rank is alone.
        maximum: Combine by MAX rather than by SUM.

    Raises:
        RuntimeError: As ``Work.wait``; or these are no longer the ranks that were meant: a clipper
            was built before the process group, or the group was destroyed.
    """
    _check(world)
    if world.process_group is None:
        return Work(None, world)
    op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    with _explained(world, _NORM):  # Gloo finds a lost connection already here
        work = dist.all_reduce(payload, op, group=world.process_group, async_op=True)
    return Work(work, world)


def gather(value: Any, world: World) -> list[Any]:
    """Collect one picklable object from every rank, in the group's order; two all-gathers.

    torch's own function for it needs numpy.

    Raises:
        RuntimeError: As ``all_reduce`` and ``Work.wait``; or, on every rank alike, a rank could not
            pickle its value.
    """
    _check(world)
    if world.process_group is None:
        return [value]
    told = _exchange(messages.pack(value, world.rank), world)
    return messages.unpack(zip(world.ranks, told, strict=True))


def _exchange(mine: bytes, world: World) -> list[memoryview]:
    """Give every rank every rank's bytes: two all-gathers, of lengths and of padded bytes."""
    device = compat.bytes_device(world.process_group, world.device)
    lengths = _all_gather(compat.on_host([len(mine)], torch.int64).to(device), world)
    sizes = lengths.flatten().tolist()
    longest = max(sizes)
    padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
    received = _all_gather(padded.to(device), world)
    told = bytearray(len(sizes) * longest)
    torch.frombuffer(told, dtype=torch.uint8).copy_(received.flatten())
    starts = range(0, len(told), longest)
    read = memoryview(told)
    return [read[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _all_gather(row: Tensor, world: World) -> Tensor:
    """Stack the ranks' rows."""
    rows = row.new_empty(world.size, row.numel())
    outputs = list(rows.unbind())
    with _explained(world, _DETAILS):
        dist.all_gather(outputs, row, group=world.process_group)
    return rows


@contextmanager
def _explained(world: World, what: str) -> Iterator[None]:
    """Tell who is missing where a collective fails; what is wrong on this rank goes through."""
    try:
        yield
    except RuntimeError as error:
        if missing_ranks.is_local(error):
            raise
        raise RuntimeError(missing_ranks.explain(error, world, what)) from error
