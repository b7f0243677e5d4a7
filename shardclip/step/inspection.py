"""A closer look, taken only when the reduced lanes have told every rank that something is wrong.

What is not finite, and where; which copies differ, and by how much. Every rank calls alike.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardclip import compat
from shardclip.comm import World, reduce
from shardclip.copies import bits
from shardclip.layout import adapters
from shardclip.plan import Seat

from .measure import Measured

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
        first: Index of the first one in the whole parameter.
        part_of: Where shards do not tell their place (plain ones that a ``layout`` places, or
            DeepSpeed's): the rank in whose part ``first`` counts, the lowest that has any.
    """

    name: str
    ranks: tuple[int, ...]
    nan: int
    infinite: int
    first: tuple[int, ...]
    part_of: int | None = None

    def __str__(self) -> str:
        what = [f"{self.nan} NaN"] if self.nan else []
        what += [f"{self.infinite} infinite"] if self.infinite else []
        place = f"[{', '.join(map(str, self.first))}]"
        place += "" if self.part_of is None else f" of rank {self.part_of}'s part"
        return f"{self.name} (rank {listed(self.ranks)}: {', '.join(what)}, first at {place})"


def nonfinite(measured: Measured, world: World) -> tuple[NonFinite, ...]:
    """Find what is not finite on any rank, by parameter. Two all-gathers of a few numbers."""
    told = reduce.gather(_nonfinite_here(measured, world.rank), world)
    by_name: dict[str, list[_Found]] = defaultdict(list)
    for entries in told:
        for entry in entries:
            by_name[entry.name].append(entry)
    return tuple(_together(entries) for entries in by_name.values())


@dataclass(frozen=True)
class _Found:
    """What is not finite in one rank's part of a parameter."""

    name: str
    rank: int
    holders: tuple[int, ...]
    nan: int
    infinite: int
    first: tuple[int, ...]
    placed: bool


def _together(entries: Sequence[_Found]) -> NonFinite:
    """Put the ranks' accounts of one parameter together."""
    pieces: dict[tuple[int, ...], tuple[int, int]] = {}
    for entry in entries:
        nan, infinite = pieces.get(entry.holders, (0, 0))
        pieces[entry.holders] = max(nan, entry.nan), max(infinite, entry.infinite)
    nan, infinite = (sum(counts) for counts in zip(*pieces.values(), strict=True))
    ranks = tuple(sorted(entry.rank for entry in entries))
    lowest = min(entries, key=lambda entry: entry.rank)
    if not lowest.placed:
        return NonFinite(lowest.name, ranks, nan, infinite, lowest.first, lowest.rank)
    return NonFinite(lowest.name, ranks, nan, infinite, min(entry.first for entry in entries))


def _nonfinite_here(measured: Measured, rank: int) -> list[_Found]:
    """Look at each of this rank's parameters."""
    out = []
    for seat, whole in zip(measured.plan.seats, measured.wholes, strict=True):
        bad = ~torch.isfinite(whole).reshape(-1)
        if not bool(bad.any()):
            continue
        nan = int(whole.isnan().sum())
        first = int(bad.nonzero()[0])
        holders = (rank,) if seat.owned is None else seat.owned.holders
        grad = measured.grads[seat.position]
        index = adapters.global_index(seat.source, grad, first)
        infinite, placed = int(bad.sum()) - nan, _placed(seat, grad)
        out.append(_Found(seat.source.name, rank, holders, nan, infinite, index, placed))
    return out


def _placed(seat: Seat, grad: Tensor | None) -> bool:
    """Whether indices in the whole parameter are known."""
    if seat.source.begins is not None or compat.is_dtensor(grad):
        return True
    if seat.owned is not None and seat.owned.holders == seat.owned.domain:
        return True  # all that have any of it have all of it
    return not seat.declared and seat.source.ownership is None


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
    held = zip(measured.plan.seats, measured.wholes, measured.local, strict=True)
    for index, (seat, whole, local) in enumerate(held):
        if seat.copy is not None:
            found = int(bits.hash_of_local(local, whole))
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
    """Compare one odd copy with a usual one, block by block.

    A rank on which that fails still joins both gathers.
    """
    mine = here if world.rank in (odd, like) else None
    told = _by_rank(lambda: None if mine is None else _Rows.of(mine), world)
    one, other = told[odd], told[like]
    if not (isinstance(one, _Rows) and isinstance(other, _Rows) and one.shape == other.shape):
        one, other, blocks = None, None, []
    else:
        pairs = zip(one.hashes, other.hashes, strict=True)
        blocks = [index for index, (a, b) in enumerate(pairs) if a != b]
    told = _by_rank(lambda: None if mine is None else _values(mine, blocks[:_BLOCKS]), world)
    if not blocks:
        return "of other sizes, or in other places"
    ours, theirs = told[odd], told[like]
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)):
        return "how far could not be told"
    apart = (ours.view(torch.int64) != theirs.view(torch.int64)).nonzero().flatten()
    at_least = "at least " if len(blocks) > _BLOCKS else ""
    first, far = int(apart[0]), float((ours - theirs).abs().nan_to_num(math.inf).max())
    row = _row_length(one.words) if one is not None else bits.ROW
    place = blocks[first // row] * row + first % row
    count = "1 element differs" if len(apart) == 1 else f"{at_least}{len(apart)} elements differ"
    return (
        f"{count}, by up to {far:.3g}; the first is number {place}, "
        f"{float(ours[first]):.9g} on rank {odd} and {float(theirs[first]):.9g} on rank {like}"
    )


@dataclass(frozen=True)
class _Rows:
    """A copy's shape, the 32-bit words of one of its numbers, and its rows' hashes."""

    shape: tuple[int, ...]
    words: int
    hashes: list[int]

    @staticmethod
    def of(tensor: Tensor) -> _Rows:
        size = compat.real_view(tensor).element_size()
        return _Rows(tuple(tensor.shape), max(1, size // 4), bits.row_hashes(tensor).tolist())


def _by_rank(make: Callable[[], object], world: World) -> dict[int, Any]:
    """Gather what each rank makes; an error's text where it cannot."""
    try:
        mine = make()
    except Exception as error:  # the other ranks wait in the gather
        mine = f"{type(error).__name__}: {error}"
    return dict(zip(world.ranks, reduce.gather(mine, world), strict=True))


def _row_length(words: int) -> int:
    """Return how many numbers a row of hashes has."""
    return bits.ROW // words


def _values(tensor: Tensor, blocks: Sequence[int]) -> Tensor:
    """Return the numbers of some of a tensor's rows as float64, which holds all their bits."""
    flat = compat.real_view(tensor).detach().resolve_neg().reshape(-1)
    row = _row_length(max(1, flat.element_size() // 4))
    held = [flat[b * row : (b + 1) * row].double().cpu() for b in blocks]
    return torch.cat(held) if held else flat[:0].double().cpu()


def listed(ranks: Iterable[int]) -> str:
    """Write ranks in a sentence, the first eight."""
    ranks = sorted(set(ranks))
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def few(lines: list[str]) -> str:
    """Put the first eight into one sentence."""
    more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
    return "; ".join(lines[:8]) + more
