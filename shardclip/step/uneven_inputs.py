"""Uneven inputs: inside torch's ``join()`` some rank may have run out of data.

A rank that has joined makes no call any more. It only shadows the collectives of what joins: one of
ours would meet one of those, and the process would abort. Nor is that rank needed: what
DistributedDataParallel has averaged, every rank has whole. So inside a join each rank measures
alone, from the first step on, and the rest is refused on all ranks alike.

Torch does not tell whether a join is under way (a module keeps its settings after the end). So
``Join.__enter__`` and ``__exit__`` note it here; besides they do what they did.
"""

import functools
import gc
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardclip.comm import World
from shardclip.layout import Source

_NOTED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The joins under way: entered, and not left."""

_WHY = (
    "a rank that has run out of data (DistributedDataParallel.join(), "
    "torch.distributed.algorithms.join.Join) makes no call any more, so nothing can be reduced"
)
_MEND = (
    "Inside it only what a DistributedDataParallel of that join() has averaged has a norm: each "
    "rank has it whole. Clip the rest outside, or, where this rank has all of it, with "
    "group=shardclip.SELF"
)


def under_way(world: World) -> bool:
    """Whether a join is under way in which other ranks of the group may have run out of data."""
    return bool(_NOTED) and bool(_joins(world))


def refuse_to_build(world: World) -> None:
    """Refuse what has to agree with all ranks, where some may be gone.

    Raises:
        ValueError: Says what to do.
    """
    if under_way(world):
        raise ValueError(
            f"a clipper cannot be built inside join(): {_WHY}. Build it before, once; its clip_() "
            "may then be called inside"
        )


def refuse_settings(names: Iterable[str], world: World) -> None:
    """Refuse a clipper's settings that need all ranks, or leave those behind that have joined.

    Args:
        names: Of the arguments that were given.
        world: Who should take part.

    Raises:
        ValueError: Names the arguments.
    """
    asked = ", ".join(names)
    if asked and under_way(world):
        raise ValueError(
            f"{asked}: not inside join(), as {_WHY}, and what depends on all steps or all ranks "
            "would differ between ranks afterwards. Clip there with a GradClipper without it"
        )


def taking_part(world: World, sources: Sequence[Source], tensors: Sequence[Tensor | None]) -> World:
    """Return the ranks whose numbers are to be combined: inside a join this one alone.

    Args:
        world: Who takes part outside.
        sources: What is measured.
        tensors: Their gradients; of a list without gradients, the tensors themselves.

    Raises:
        ValueError: Some of it needs other ranks, or may do so: names it. It is decided by what all
            ranks have alike, never by whether a rank has joined.
    """
    if not under_way(world):
        return world
    joins = _joins(world)
    modules = [one for join in joins for one in _joined(join)]
    averaged = {id(p): one for one in modules for p in _averaged(one)}
    by_gradient = {id(p.grad): one for one in modules for p in _averaged(one) if p.grad is not None}
    wrong: dict[str, list[str]] = defaultdict(list)
    for source, tensor in zip(sources, tensors, strict=True):
        held = source.parameter
        module = averaged.get(id(held))
        if tensor is held and module is None:
            module = by_gradient.get(id(tensor))
        elif tensor is None and not getattr(held, "requires_grad", True):
            continue
        elif tensor is not None and tensor is not held and tensor is not held.grad:
            module = None
        problem = _problem(module, world)
        if problem:
            wrong[problem].append(source.name)
    if wrong:
        text = "; ".join(f"{_few(names)}: {problem}" for problem, names in wrong.items())
        raise ValueError(f"{text}. A join() is under way, and {_WHY}. {_MEND}")
    return World((world.rank,), world.rank, alike=True)


def _problem(module: Any, world: World) -> str | None:
    """Tell why a gradient of this module (None: of none) is not whole on every rank."""
    if module is None:
        return "not averaged by a DistributedDataParallel of the join()"
    outside = sorted(set(world.ranks) - _ranks(module.process_group))
    if outside:
        return (
            f"rank(s) {', '.join(map(str, outside[:8]))} of the group are not in its module's "
            "process group; pass that as group="
        )
    if not module.require_backward_grad_sync:
        return "its gradient is not averaged yet: this is inside no_sync()"
    return None


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _joins(world: World) -> list[Any]:
    """List the joins that another rank of the group may have left."""
    others = set(world.ranks) - {world.rank}
    enabled = [join for join in list(_NOTED) if getattr(join, "_enable", True)]
    return [join for join in enabled if others & _ranks(getattr(join, "_process_group", None))]


def _ranks(group: Any) -> set[int]:
    return set(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def _joined(join: Any) -> list[Any]:
    """List a join's modules; what else may join, an optimizer say, averages nothing."""
    joinables = getattr(join, "_joinables", ())
    return [one for one in joinables if isinstance(one, DistributedDataParallel)]


def _averaged(module: Any) -> Sequence[Tensor]:
    """List the parameters whose gradients a module averages: not those it was told to ignore."""
    return getattr(module, "_module_parameters", ())


def _watch() -> None:
    """Note from now on what is entered and left; and what was entered before this was imported."""
    enter: Any = Join.__enter__
    leave: Any = Join.__exit__

    @functools.wraps(enter)
    def noted_enter(self: Any) -> Any:
        _NOTED.add(self)
        return enter(self)

    @functools.wraps(leave)
    def noted_leave(self: Any, *raised: Any) -> Any:
        try:
            return leave(self, *raised)
        finally:
            _NOTED.discard(self)

    Join.__enter__, Join.__exit__ = noted_enter, noted_leave  # type: ignore[method-assign]
    if dist.is_available() and dist.is_initialized():  # a join lives as long as its block
        _NOTED.update(one for one in gc.get_objects() if issubclass(type(one), Join))


_watch()
