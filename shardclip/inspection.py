"""A closer look, taken only when the reduced lanes have told every rank that something is wrong.

What is not finite, and where; which copies differ, and by how much. Every rank calls alike.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import adapters, drift, reduce
from .measure import Measured
from .world import World

_MOST = 8  # tensors that are looked at closely
_BLOCKS = 16  # of each, blocks whose values are compared


@dataclass(frozen=True)
class NonFinite:
    """A parameter whose gradient is not finite.

    Attributes:
        name: The parameter.
        ranks: Those that hold such elements, ascending.
        nan: How many elements are NaN, copies counted once.
        infinite: How many are infinite.
        first: Index of the first one in the whole parameter; where a framework's shard does not
            tell that, in this rank's part of it, flat.
    """

    name: str
    ranks: tuple[int, ...]
    nan: int
    infinite: int
    first: tuple[int, ...]

    def __str__(self) -> str:
        what = [f"{self.nan} NaN"] if self.nan else []
        what += [f"{self.infinite} infinite"] if self.infinite else []
        place = ", ".join(map(str, self.first))
        return f"{self.name} (rank {listed(self.ranks)}: {', '.join(what)}, first at [{place}])"


def nonfinite(measured: Measured, world: World) -> tuple[NonFinite, ...]:
    """Find what is not finite on any rank, by parameter. Two all-gathers of a few numbers."""
    told = reduce.gather(_nonfinite_here(measured, world.rank), world)
    by_name: dict[str, list[tuple[int, tuple[int, ...], tuple[int, int], tuple[int, ...]]]]
    by_name = defaultdict(list)
    for rank, entries in zip(world.ranks, told, strict=True):
        for name, holders, counts, first in entries:
            by_name[name].append((rank, holders, counts, first))
    out = []
    for name, entries in by_name.items():
        pieces: dict[tuple[int, ...], tuple[int, int]] = {}
        for _, holders, (nan, infinite), _ in entries:
            before = pieces.get(holders, (0, 0))
            pieces[holders] = max(before[0], nan), max(before[1], infinite)
        nan, infinite = (sum(counts) for counts in zip(*pieces.values(), strict=True))
        ranks = tuple(sorted(entry[0] for entry in entries))
        out.append(NonFinite(name, ranks, nan, infinite, min(entry[3] for entry in entries)))
    return tuple(out)


def _nonfinite_here(
    measured: Measured, rank: int
) -> list[tuple[str, tuple[int, ...], tuple[int, int], tuple[int, ...]]]:
    """For each of this rank's parameters: name, holders, NaN and infinities, the first one."""
    out = []
    for seat, whole, local in zip(
        measured.plan.seats, measured.wholes, measured.local, strict=True
    ):
        bad = ~torch.isfinite(whole).reshape(-1)
        if not bool(bad.any()):
            continue
        nan = int(whole.isnan().sum())
        first = int(bad.nonzero()[0])
        holders = (rank,) if seat.copy is None else seat.copy.holders
        grad = measured.grads[seat.position]
        index: tuple[int, ...] = (first,)
        if grad is not None and whole is local:  # not sparse, whose values are in a row
            index = adapters.global_index(grad, first)
        out.append((seat.source.name, holders, (nan, int(bad.sum()) - nan), index))
    return out


@dataclass(frozen=True)
class _Hashed:
    """One rank's copy of a tensor, and the hash of its bits."""

    name: str
    ordinal: int
    holders: tuple[int, ...]
    hash: int
    seat: int = field(compare=False)


def drifted(measured: Measured, world: World) -> list[str]:
    """Describe the copies that differ in any bit: parameter, ranks, and how far apart they are.

    Gathers all hashes; then, of the first few that differ, hashes of blocks, and a few blocks.
    """
    told = reduce.gather(_hashed(measured), world)
    groups: dict[tuple[int, tuple[int, ...]], dict[int, _Hashed]] = defaultdict(dict)
    for rank, entries in zip(world.ranks, told, strict=True):
        for entry in entries:
            groups[entry.ordinal, entry.holders][rank] = entry
    differing = [held for held in groups.values() if _differ(held)]
    lines = [_compared(held, measured, world) for held in differing[:_MOST]]
    return lines + [next(iter(held.values())).name for held in differing[_MOST:]]


def _hashed(measured: Measured) -> list[_Hashed]:
    """Hash this rank's copies."""
    out = []
    for index, (seat, whole) in enumerate(zip(measured.plan.seats, measured.wholes, strict=True)):
        if seat.copy is not None:
            found = int(drift.hash_of(whole))
            out.append(
                _Hashed(seat.source.name, seat.copy.ordinal, seat.copy.holders, found, index)
            )
    return out


def _differ(held: dict[int, _Hashed]) -> bool:
    whole = len(next(iter(held.values())).holders)
    return len(held) < whole or len({entry.hash for entry in held.values()}) > 1


def _compared(held: dict[int, _Hashed], measured: Measured, world: World) -> str:
    """Describe one tensor's copies; all ranks call, those that hold none have nothing to say."""
    name = next(iter(held.values())).name
    missing = set(next(iter(held.values())).holders) - set(held)
    if missing:
        return f"{name}: on rank {listed(held)}, but not on rank {listed(missing)}"
    votes = Counter(entry.hash for entry in held.values())
    usual, count = votes.most_common(1)[0]
    odd = [rank for rank, entry in held.items() if entry.hash != usual]
    like = next(rank for rank, entry in held.items() if entry.hash == usual)
    mine = held.get(world.rank)
    here = None if mine is None else measured.wholes[mine.seat]
    far = _distance(here, odd[0], like, world)
    if count * 2 > len(held):
        return f"{name}: rank {listed(odd)} differs from the majority: {far}"
    return f"{name}: ranks {listed(held)} differ: {far}"


def _distance(here: Tensor | None, odd: int, like: int, world: World) -> str:
    """Compare one odd copy with a usual one, block by block."""
    speaks = here is not None and world.rank in (odd, like)
    rows = drift.row_hashes(here).tolist() if speaks and here is not None else None
    by_rank = dict(zip(world.ranks, reduce.gather(rows, world), strict=True))
    pairs = zip(by_rank[odd], by_rank[like], strict=False)
    blocks = [index for index, (a, b) in enumerate(pairs) if a != b]
    values, row = (None, 0)
    if speaks and here is not None:
        values, row = _values(here, blocks[:_BLOCKS])
    told = dict(zip(world.ranks, reduce.gather((values, row), world), strict=True))
    (one, row), (other, _) = told[odd], told[like]
    if one.shape != other.shape:
        return "of other shapes"
    apart = (one.view(torch.int64) != other.view(torch.int64)).nonzero().flatten()
    at_least = "at least " if len(blocks) > _BLOCKS else ""
    first, far = int(apart[0]), float((one - other).abs().nan_to_num(math.inf).max())
    place = blocks[first // row] * row + first % row
    return (
        f"{at_least}{len(apart)} elements differ, by up to {far:.3g}; the first is number {place}, "
        f"{float(one[first]):.9g} on rank {odd} and {float(other[first]):.9g} on rank {like}"
    )


def _values(tensor: Tensor, blocks: Sequence[int]) -> tuple[Tensor, int]:
    """Return the numbers of some of a tensor's rows as float64, and how many a row has."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    per = max(1, flat.element_size() // 4)  # 32-bit words of one number
    row = drift.ROW // per
    return torch.cat([flat[b * row : (b + 1) * row].double().cpu() for b in blocks]), row


def listed(ranks: Iterable[int]) -> str:
    """Write ranks in a sentence, the first eight."""
    ranks = sorted(set(ranks))
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
