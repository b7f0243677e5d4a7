"""What the ranks agree on when a GradClipper is built: names, who holds what, and lanes."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shardclip._version import __version__
from shardclip.comm import World, messages, reduce
from shardclip.layout import Planner, Source

from . import verdict
from .accounts import Described, check_groups, check_names, describe, names_of, tied

_MOST_SLOTS = 1024  # beyond this, tensors share slots
_MOST_SLOTS_EXACT = 128  # where each lane takes many integers


@dataclass(frozen=True)
class Settings:
    """What must be the same on every rank: it decides the payload, or what ranks do with it."""

    norm_type: float
    nonfinite: str
    norms: str | None
    also: tuple[str, ...]
    check_replicas: int = 0
    max_consecutive_skips: int | None = None
    exact: bool = False
    version: str = __version__


@dataclass(frozen=True)
class Agreement:
    """The same on every rank, but for what is this rank's own.

    Attributes:
        limits: The param groups' own thresholds ("default" where a group has none), from the rank
            with most groups.
        slots: Slots for the proof of copies.
        keys: Names of the norms, in the lanes' order.
        numbers: This rank's sources' numbers among all tensors that have copies.
        key_of: This rank's sources' indices among the keys.
        notices: What to warn of when all ranks are through.
        wide: Some rank has parameters of double precision.
    """

    limits: list[Any]
    slots: int
    keys: tuple[str, ...]
    numbers: list[int]
    key_of: list[int]
    notices: list[str]
    wide: bool = False


def agree(value: Any, world: World) -> list[Any]:
    """Give every rank every rank's value, in the group's order.

    Most ranks say the same, so digests travel first and each distinct value once: four all-gathers.
    """
    if world.size == 1:
        return [value]
    packed = messages.pack(value, world.rank)
    digests = reduce.gather(hashlib.sha256(packed).digest(), world)
    mine = world.ranks.index(world.rank)
    first = digests.index(digests[mine]) == mine
    told = reduce.gather(packed if first else None, world)
    kept = {
        digest: (rank, packed)
        for digest, rank, packed in zip(digests, world.ranks, told, strict=True)
        if packed is not None
    }
    values = dict(zip(kept, messages.unpack(kept.values()), strict=True))
    return [values[digest] for digest in digests]


def _entry(source: Source) -> tuple[str, tuple[int, ...], str]:
    tensor = source.parameter
    return source.name, tuple(getattr(tensor, "shape", ())), str(getattr(tensor, "dtype", ""))


def _settle(sources: Sequence[Source], planner: Planner) -> None:
    """Tell the planner by names which ranks have a parameter.

    Ranks without one of the same name, shape and dtype hold other parameters.
    """
    named = [_entry(source) for source in sources if source.owner is not None]
    told = agree(named, planner.world)
    having: dict[Any, set[int]] = defaultdict(set)
    for entries, ranks in _distinct(told, planner.world.ranks):
        for entry in entries:
            having[entry].update(ranks)
    sets: dict[frozenset[int], frozenset[int]] = {}  # equal ones become one object
    frozen = {entry: frozenset(having[entry]) for entry in named}
    frozen = {entry: sets.setdefault(ranks, ranks) for entry, ranks in frozen.items()}
    planner.having = lambda source: frozen.get(_entry(source)) if source.owner is not None else None


def _distinct(told: Sequence[Any], ranks: Sequence[int]) -> list[tuple[Any, list[int]]]:
    """Put ranks together that told the same (``agree`` gives them the same object)."""
    by_value: dict[int, tuple[Any, list[int]]] = {}
    for value, rank in zip(told, ranks, strict=True):
        by_value.setdefault(id(value), (value, []))[1].append(rank)
    return list(by_value.values())


def reach(
    sources: Sequence[Source],
    planner: Planner,
    settings: Settings,
    limits: list[Any],
    problems: list[tuple[str, str]],
) -> Agreement:
    """Agree on lanes for everything that every rank's step has to send.

    Args:
        sources: This rank's.
        planner: Learns from the names which ranks hold copies.
        settings: What must be the same.
        limits: Thresholds of this rank's param groups.
        problems: What is wrong on this rank already.

    Raises:
        ValueError, TypeError: On every rank alike: a rank's parameters or layout are wrong, or the
            settings differ.
    """
    _settle(sources, planner)
    unnamed: Counter[object] = Counter()
    described = [describe(source, planner, unnamed) for source in sources]
    mine = [entry for entry in described if isinstance(entry, Described)]
    problems = [*problems, *(entry for entry in described if not isinstance(entry, Described))]
    dtypes = {getattr(source.parameter, "dtype", None) for source in sources}
    wide = not dtypes.isdisjoint({torch.float64, torch.complex128})
    told = agree((mine, problems, settings, limits, wide), planner.world)
    verdict.raise_told(
        [(rank, wrong) for rank, (_, wrong, *_) in zip(planner.world.ranks, told, strict=True)]
    )
    distinct = _distinct(told, planner.world.ranks)
    verdict.raise_unlike([(asdict(value[2]), ranks) for value, ranks in distinct])
    accounts = [(value[0], ranks) for value, ranks in distinct]
    check_groups(accounts)
    check_names(accounts, list(zip(sources, mine, strict=True)), planner)
    everything = [entry for value, _ in distinct for entry in value[0] if entry.held]
    first = {entry.identity: entry for entry in reversed(everything)}
    known = {entry.identity: first[entry.identity] for entry in everything}
    copied = dict.fromkeys(entry.identity for entry in everything if entry.copied)
    number = {identity: index for index, identity in enumerate(copied)}
    names = names_of(known.values(), settings.norms)
    keys = tuple(dict.fromkeys(names.values()))
    index = {key: position for position, key in enumerate(keys)}
    return Agreement(
        max((value[3] for value, _ in distinct), key=len),
        min(len(number), _MOST_SLOTS_EXACT if settings.exact else _MOST_SLOTS),
        keys if settings.norms is not None else (),
        [number.get(entry.identity, 0) for entry in mine],
        [index[names[entry.identity]] if entry.held else 0 for entry in mine],
        tied(known.values()),
        any(value[4] for value, _ in distinct),
    )
