"""The only file that calls a collective."""

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import compat, roll_call
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
    if not (dist.is_available() and dist.is_initialized()):
        return World((0,), 0)
    rank = dist.get_rank()
    if group is SELF:
        return World((rank,), rank)
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
    if len(ranks) == 1:
        return World(ranks, rank)
    return World(ranks, rank, group, _payload_device(group))


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
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(roll_call.explain(error, self._world, _NORM)) from error


def all_reduce(payload: Tensor, world: World, *, maximum: bool = False) -> Work:
    """Start to combine the ranks' payloads, in place, on the payload's device. One all-reduce.

    Args:
        payload: float64 of the same shape on every rank.
        world: Who takes part; nothing happens where a rank is alone.
        maximum: Combine by MAX rather than by SUM.
    """
    if world.process_group is None:
        return Work(None, world)
    op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    try:
        work = dist.all_reduce(payload, op, group=world.process_group, async_op=True)
    except RuntimeError as error:  # Gloo finds a lost connection already here
        raise RuntimeError(roll_call.explain(error, world, _NORM)) from error
    return Work(work, world)


def gather(value: Any, world: World) -> list[Any]:
    """Collect one picklable object from every rank, in the group's order; two all-gathers.

    Raises:
        RuntimeError: As ``Work.wait``.
    """
    if world.process_group is None:
        return [value]
    values: list[Any] = [None] * world.size
    try:
        dist.all_gather_object(values, value, group=world.process_group)
    except RuntimeError as error:
        raise RuntimeError(roll_call.explain(error, world, _DETAILS)) from error
    return values
