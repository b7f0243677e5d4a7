"""A plan: which local tensors this rank reads, in which bucket, and what it owes to the proof."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardclip import compat, kernels
from shardclip.comm import Lanes
from shardclip.copies import Copy
from shardclip.errors import problem
from shardclip.layout import Planner, Settled, Shares, Source, adapters

from .seats import Bucket, Seat, cut
from .tables import Tables

FUNCTION_LANES = Lanes(checks=True)
"""The functions have agreed on nothing, so that their payload's length is a constant."""


_WIDE = frozenset({torch.float64, torch.complex128})


@dataclass
class Plan:
    """What one rank does in a step.

    Attributes:
        lanes: The payload's layout.
        seats: One for each source that has something to count here.
        buckets: The sums.
        problems: What is wrong with this rank's tensors, as the error's type and text; the step
            then raises on every rank.
        proves: Whether copies stand here that nothing but the proof vouches for.
        notices: What to warn of, and about what, once the step is through: a warning may be an
            error, and must not keep this rank from the all-reduce.
        dense: No gradient is sparse.
        wide: Some gradient is of double precision.
        splits: Some gradient is read in part.
        build: Makes the kernel.
    """

    lanes: Lanes
    seats: list[Seat] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    proves: bool = False
    notices: list[tuple[object, str]] = field(default_factory=list)
    dense: bool = True
    wide: bool = False
    splits: bool = False
    build: Callable[[Sequence[Tensor], Sequence[int], int], kernels.Kernel] = kernels.build

    _tables: Tables | None = None

    def read(self) -> list[Seat]:
        """Return the seats that this rank reads anything of."""
        return [seat for seat in self.seats if seat.part is not None]

    def copied(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the seats' tensors that other ranks hold copies of."""
        pairs = zip(wholes, self.seats, strict=True)
        return [whole for whole, seat in pairs if seat.copy is not None]

    def each(self) -> Tensor | None:
        """Return the kernel's sum for each tensor of the last step, where it makes one."""
        return None if self._tables is None else self._tables.kernel.each

    def without_parameters(self) -> Plan:
        """Return the same with no parameter but their names, for what must not keep them alive."""
        seats = [replace(seat, source=replace(seat.source, parameter=None)) for seat in self.seats]
        return replace(self, seats=seats, notices=[])

    def tables(
        self, parts: Sequence[Tensor], wholes: Sequence[Tensor], device: torch.device
    ) -> Tables:
        """Return what every step looks up, kept on the devices after the first."""
        if self._tables is None:
            kernel = self.build(parts, [seat.bucket for seat in self.read()], len(self.buckets))
            held = self.copied(wholes)
            self._tables = Tables.of(self.seats, self.buckets, self.lanes, kernel, held, device)
        return self._tables


def make(
    planner: Planner,
    pairs: Sequence[tuple[Source, Tensor | None]],
    lanes: Lanes,
    keys: Sequence[int | None] | None = None,
    numbers: Sequence[int] | None = None,
    spread: bool = False,
    maximum: bool = False,
    accept: Callable[[torch.dtype], None] | None = None,
) -> Plan:
    """Settle every source. Time linear in their number.

    Args:
        planner: Knows the ranks and the layout.
        pairs: Sources with their gradients; those without still count in the numbering.
        lanes: The payload's layout.
        keys: For each source its key's index, where keys have norms.
        numbers: For each source its number, the same on all ranks that hold it; by default counted
            here among the sources that the same ranks hold.
        spread: Numbers of other sets of ranks may be the same: keep their slots apart.
        maximum: p is inf: copies change nothing, so nothing is split or proved.
        accept: Raises for dtypes that cannot be summed.
    """
    plan = Plan(lanes, build=kernels.build_alike if planner.world.alike else kernels.build)
    settled = _settle(plan, planner, pairs, accept)
    numbered = _number(settled, numbers)
    parts = {} if maximum else _share(settled, numbered, pairs, planner.world.rank, spread)
    buckets: dict[Bucket, int] = {}
    for index, found in settled.items():
        source, grad = pairs[index]
        if found.owned is None or grad is None:
            continue
        owned, number = found.owned, numbered[index]
        copy = None
        if len(owned.holders) > 1 and lanes.slots and not maximum:
            slot = (number + (planner.digest(owned.domain) if spread else 0)) % lanes.slots
            mine = owned.holders.index(planner.world.rank)
            copy = Copy(slot, number, owned.holders, mine, 1 / len(owned.domain))
        weight = 1.0 if owned.split or maximum else 1.0 / len(owned.holders)
        if lanes.window is not None and weight < 1:  # one counts it: a fraction is not exact
            weight = float(owned.holders[0] == planner.world.rank)
        bucket = Bucket(source.group, None if keys is None else keys[index], weight)
        where = buckets.setdefault(bucket, len(buckets))
        part = parts.get(index, (0, 1))
        plan.seats.append(Seat(source, index, where, part, copy, found.declared, owned))
    plan.buckets = list(buckets)
    plan.dense = all(g is None or compat.is_strided(g) for _, g in pairs)
    plan.wide = any(getattr(g, "dtype", None) in _WIDE for _, g in pairs)
    plan.splits = any(seat.part != (0, 1) for seat in plan.seats)
    plan.proves = any(seat.copy is not None and not seat.declared for seat in plan.seats)
    plan.notices += _uncertain(planner, settled, pairs)
    return plan


def _settle(
    plan: Plan,
    planner: Planner,
    pairs: Sequence[tuple[Source, Tensor | None]],
    accept: Callable[[torch.dtype], None] | None,
) -> dict[int, Settled]:
    """Tell by position who holds what; what is wrong becomes a problem of the plan."""
    settled = {}
    for index, (source, grad) in enumerate(pairs):
        tensor = source.parameter if grad is None else grad
        try:
            adapters.check(tensor, gradient=grad is not None)
            if accept is not None and grad is not None:
                accept(grad.dtype)
            settled[index] = planner.settle_one(source, tensor)
        except Exception as error:  # a user's layout may raise anything, on one rank alone
            plan.problems.append(problem(source.name, error))
    return settled


def _number(settled: dict[int, Settled], numbers: Sequence[int] | None) -> dict[int, int]:
    """Number the sources, by default among those that the same ranks hold."""
    if numbers is not None:
        return {index: numbers[index] for index in settled}
    counts: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
    held = {index: found.owned for index, found in settled.items() if found.owned is not None}
    return {index: next(counts[id(owned.domain)]) for index, owned in held.items()}


def _share(
    settled: dict[int, Settled],
    numbered: dict[int, int],
    pairs: Sequence[tuple[Source, Tensor | None]],
    rank: int,
    loosely: bool,
) -> dict[int, tuple[int, int] | None]:
    """Split the reading of what several ranks hold.

    Sources without a gradient take part: a gradient that one rank alone lacks must not change
    what the others read. Sizes are the parameters', which all holders know. Where the ranks have
    not agreed on a list (``loosely``), each tensor is split by its size alone.
    """
    shares = Shares(rank)
    parts = {}
    for index in sorted(numbered, key=numbered.__getitem__):
        owned = settled[index].owned
        if owned is not None and owned.shared:
            source = pairs[index][0]
            span = source.span
            numel = compat.local_numel(source.parameter) if span is None else span[1] - span[0]
            cut = shares.even if loosely else shares.part
            parts[index] = cut(owned.holders, numel)
    return parts


def locals_of(plan: Plan, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the seats' local gradients, as they are stored.

    Raises:
        ValueError: Elements of one share memory, which its kind does not tell: a plan may have been
            made for another of this kind.
    """
    if len(plan.seats) < len(grads):
        grads = [grads[seat.position] for seat in plan.seats]
    local = compat.local_tensors(grads)
    shared = compat.first_sharing_memory(local, plan.dense)
    if shared is not None:
        raise ValueError(f"{plan.seats[shared].source.name}: {adapters.SHARED}")
    return local


def readings(plan: Plan, local: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return what this rank reads of the gradients, and seat by seat the whole local values."""
    wholes = list(local) if plan.dense else [adapters.values(tensor) for tensor in local]
    if not plan.splits:
        return wholes, wholes
    pairs = zip(plan.seats, wholes, strict=True)
    return [cut(seat, whole) for seat, whole in pairs if seat.part is not None], wholes


def _uncertain(
    planner: Planner,
    settled: dict[int, Settled],
    pairs: Sequence[tuple[Source, Tensor | None]],
) -> list[tuple[object, str]]:
    """Notice where this rank's meshes say nothing about some ranks of the group."""
    known = {id(found.known): found.known for found in settled.values()}
    others = sorted(planner.group - set().union(*known.values()))
    undeclared = (i for i, found in settled.items() if found.owned and not found.declared)
    index = next(undeclared, None)
    if index is None or not others:
        return []
    source, grad = pairs[index]
    tensor = source.parameter if grad is None else grad
    shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
    text = (
        f"{source.name}: this rank's device meshes do not cover rank(s) {shown} of the group; what "
        "those hold is counted as other parameters. Where they hold copies, or should have a norm "
        "of their own, say so with layout= or group="
    )
    return [(getattr(tensor, "device_mesh", source.parameter), text)]
