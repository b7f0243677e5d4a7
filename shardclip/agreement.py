"""What the ranks agree on when a GradClipper is built: names, who holds what, and lanes."""

import hashlib
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import reduce, verdict
from .gradients import Source
from .notices import warn_once
from .plan import Planner
from .world import World

_MOST_SLOTS = 1024  # beyond this, tensors share slots


@dataclass(frozen=True)
class Agreement:
    """The same on every rank, but for what is this rank's own.

    Attributes:
        groups: Param groups, at most, on any rank.
        slots: Slots for the proof of copies.
        keys: Names of the norms, in the lanes' order.
        numbers: This rank's sources' numbers among all tensors that have copies.
        key_of: This rank's sources' indices among the keys.
    """

    groups: int
    slots: int
    keys: tuple[str, ...]
    numbers: list[int]
    key_of: list[int]


def agree(value: Any, world: World) -> list[Any]:
    """Give every rank every rank's value, in the group's order.

    Most ranks say the same, so digests travel first and each distinct value once: four all-gathers.
    """
    packed = pickle.dumps(value)
    digests = reduce.gather(hashlib.sha256(packed).digest(), world)
    mine = world.ranks.index(world.rank)
    first = digests.index(digests[mine]) == mine
    told = reduce.gather(packed if first else None, world)
    kept = {d: v for d, v in zip(digests, told, strict=True) if v is not None}
    values = {digest: pickle.loads(v) for digest, v in kept.items()}
    return [values[digest] for digest in digests]


def _entry(source: Source) -> tuple[str, tuple[int, ...], str]:
    tensor = source.parameter
    return source.name, tuple(getattr(tensor, "shape", ())), str(getattr(tensor, "dtype", ""))


def settle(sources: Sequence[Source], planner: Planner) -> None:
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


@dataclass(frozen=True)
class _Identity:
    """What makes a parameter the same one on all ranks that hold any of it.

    Attributes:
        label: Its name; without one, its number among those that the same ranks hold.
        lowest: The lowest of the ranks that hold it.
        ranks: How many there are.
        digest: Of which.
        stage: Its pipeline stage, where it lies on one alone.
        shape: Of the whole tensor, where its stage counts.
    """

    label: str
    lowest: int
    ranks: int
    digest: int
    stage: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Described:
    """One rank's account of one of its sources."""

    identity: _Identity
    name: str
    owner: str | None
    copied: bool


def _describe(
    source: Source, planner: Planner, unnamed: Counter[object]
) -> _Described | tuple[str, str]:
    """Describe a source, or return an error's type and text."""
    try:
        if not isinstance(source.parameter, Tensor):
            raise TypeError("is no tensor; give tensors or (name, tensor) pairs")
        owned = planner.settle_one(source, source.parameter).owned
    except Exception as error:  # a user's layout may raise anything, on one rank alone
        return type(error).__name__, f"{source.name}: {error}"
    domain = owned.domain if owned is not None else ()
    label = source.name
    shape: tuple[int, ...] = ()
    if source.owner is None:
        label = f"[{source.group}.{unnamed[domain]}]"
        unnamed[domain] += 1
    elif owned is not None and owned.stage is not None:
        shape = tuple(source.parameter.shape)
    stage = None if owned is None else owned.stage
    lowest = domain[0] if domain else -1
    identity = _Identity(label, lowest, len(domain), planner.digest(domain), stage, shape)
    copied = owned is not None and len(owned.holders) > 1
    return _Described(identity, source.name, source.owner, copied)


def conclude(
    sources: Sequence[Source], planner: Planner, groups: int, norms: str | None
) -> Agreement:
    """Agree on lanes for everything that every rank's step has to send.

    Raises:
        ValueError, TypeError: On every rank alike, if any rank's layout is wrong.
    """
    unnamed: Counter[object] = Counter()
    described = [_describe(source, planner, unnamed) for source in sources]
    mine = [entry for entry in described if isinstance(entry, _Described)]
    problems = [entry for entry in described if not isinstance(entry, _Described)]
    told = agree((mine, problems, groups), planner.world)
    verdict.raise_told(
        [(rank, wrong) for rank, (_, wrong, _) in zip(planner.world.ranks, told, strict=True)]
    )
    distinct = [value for value, _ in _distinct(told, planner.world.ranks)]
    everything = [entry for entries, _, _ in distinct for entry in entries]
    first = {entry.identity: entry for entry in reversed(everything)}
    known = {entry.identity: first[entry.identity] for entry in everything}
    _warn_if_tied(known.values(), planner)
    copied = dict.fromkeys(entry.identity for entry in everything if entry.copied)
    number = {identity: index for index, identity in enumerate(copied)}
    names = _names(known.values(), norms)
    keys = tuple(dict.fromkeys(names.values()))
    index = {key: position for position, key in enumerate(keys)}
    return Agreement(
        max(count for _, _, count in distinct),
        min(len(number), _MOST_SLOTS),
        keys if norms is not None else (),
        [number.get(entry.identity, 0) for entry in mine],
        [index[names[entry.identity]] for entry in mine],
    )


def _names(entries: Iterable[_Described], norms: str | None) -> dict[_Identity, str]:
    """Name every parameter of the job; others of the same name elsewhere get a suffix."""
    by_name: dict[str, list[_Described]] = defaultdict(list)
    for entry in entries:
        by_name[entry.name].append(entry)
    names = {}
    for same in by_name.values():
        same.sort(key=_by_stage)
        for index, entry in enumerate(same):
            stage = entry.identity.stage
            suffix = f"@pp{index if stage is None else stage}" if index else ""
            owner = entry.name if entry.owner is None else entry.owner
            names[entry.identity] = (owner if norms == "module" else entry.name) + suffix
    return names


def _by_stage(entry: _Described) -> tuple[int, int]:
    stage = entry.identity.stage
    return -1 if stage is None else stage, entry.identity.lowest


def _warn_if_tied(entries: Iterable[_Described], about: object) -> None:
    """Warn of same-named parameters of one shape on several pipeline stages."""
    seen: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
    for entry in entries:
        if entry.identity.stage is not None and entry.owner is not None:
            seen[entry.name, entry.identity.shape].add(entry.identity.stage)
    shared = [name for (name, _), stages in seen.items() if len(stages) > 1]
    if shared:
        more = f" and {len(shared) - 4} more" if len(shared) > 4 else ""
        warn_once(
            about,
            f"{', '.join(shared[:4])}{more}: parameters of this name and shape are on several "
            "pipeline stages and are counted as different ones. If they are tied, say so with "
            "layout=, giving the mesh of those stages and Replicate(); for one stage's norm alone, "
            "use group=",
        )
