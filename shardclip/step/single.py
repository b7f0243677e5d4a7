"""One measurement on its own: planned, reduced and judged. What the functions do."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardclip.comm import Lanes, World
from shardclip.layout import Layout, Planner, Source
from shardclip.math import DOUBLE, norm
from shardclip.notices import warn_once
from shardclip.plan import accept, builder, cache, plan

from . import uneven_inputs, verdict
from .measure import Measured, measure

_SLOTS_EXACT = 64  # each of their lanes takes many integers

_pending: dict[tuple[int, ...], tuple[World, verdict.Deferred]] = {}


def measure_once(
    sources: Sequence[Source],
    grads: Sequence[Tensor | None],
    p: float,
    world: World,
    layout: Layout,
    *,
    strict: bool = False,
    max_norm: float = math.inf,
    limit: str = "max_norm",
    numbers: Sequence[int] | None = None,
    exact: bool = False,
    problems: Sequence[tuple[str, str]] = (),
) -> tuple[Measured, float | Tensor]:
    """Plan, sum, reduce and judge; return the measurement and the coefficient.

    The coefficient is a number where reading it costs nothing, else a tensor. ``norm_type`` and
    ``max_norm``, which the caller knows by the name ``limit``, must be alike on all ranks. The
    caller's ``problems`` with this rank's sources raise on all of them.
    """
    world = uneven_inputs.taking_part(world, sources, grads)
    earlier, previous = _pending.pop(world.ranks, (world, None))
    if previous is not None and earlier.holds():  # ranks of a new job may not know of it
        previous.settle(world)
    lanes = _lanes(world, exact)
    make = partial(_planned, sources, grads, p, world, layout, lanes, numbers, problems)
    # Else it depends on more than can be compared.
    again = layout is None and numbers is None and not problems
    key = world.ranks, world.rank, world.device, world.alike, lanes, norm.is_maximum(p)
    made = cache.find(key, sources, grads, make) if again else make()
    # Worth a host sync: copies that no layout vouches for, what is wrong here, nothing at all.
    reads = strict or made.proves or bool(made.problems) or not made.seats
    settings = {"norm_type": p, limit: max_norm}
    found = measure(made, grads, p, world, strict=strict, reads=reads, settings=settings)
    deferred = verdict.pass_verdict(found, world)
    for about, message in made.notices:
        warn_once(about, message)
    coef = norm.clip_coef(found.total_norm, max_norm)
    if deferred is None:
        return found, float(coef)
    _pending[world.ranks] = world, deferred.without_parameters()
    failed = deferred.failed.to(found.total_norm.device)
    found.total_norm = torch.where(failed, torch.nan, found.total_norm)
    return found, torch.where(failed, 1.0, coef)


def _lanes(world: World, exact: bool) -> Lanes:
    lanes = plan.FUNCTION_LANES if world.size > 1 else Lanes(slots=1)
    if exact:
        lanes = replace(lanes, slots=min(lanes.slots, _SLOTS_EXACT), window=DOUBLE)
    return lanes


def _planned(
    sources: Sequence[Source],
    grads: Sequence[Tensor | None],
    p: float,
    world: World,
    layout: Layout,
    lanes: Lanes,
    numbers: Sequence[int] | None,
    problems: Sequence[tuple[str, str]],
) -> plan.Plan:
    made = plan.make(
        Planner(world, layout),
        list(zip(sources, grads, strict=True)),
        lanes,
        numbers=numbers,
        spread=True,
        maximum=norm.is_maximum(p),
        accept=accept(p, lanes.window),
    )
    if lanes.window is not None:
        made.build = builder(lanes.window)
    made.problems += problems
    return made


def rounded(found: Measured) -> Tensor:
    """Round the norm to what this rank's gradients call for, on their device."""
    return found.total_norm.to(*found.kind(), copy=True)
