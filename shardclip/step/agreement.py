"""What the ranks agree on when a GradClipper is built: names, who holds what, and lanes."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shardclip import compat
from shardclip._version import __version__
from shardclip.comm import World, messages, reduce
from shardclip.errors import problem
from shardclip.layout import Planner, Source

from . import verdict
from .inspection import listed

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
    """One rank's account of one of its sources.

    Attributes:
        identity: Which parameter it is.
        name: What it is called.
        owner: The module that holds it.
        copied: Other ranks hold copies.
        held: This rank holds some of it.
        spread: It is a DTensor, which every rank of its mesh must list.
        group: The param group it is in.
    """

    identity: _Identity
    name: str
    owner: str | None
    copied: bool
    held: bool
    spread: bool
    group: int


def _describe(
    source: Source, planner: Planner, unnamed: Counter[object]
) -> _Described | tuple[str, str]:
    """Describe a source, or return an error's type and text."""
    try:
        if not isinstance(source.parameter, Tensor):
            raise TypeError("is no tensor; give tensors or (name, tensor) pairs")
        settled = planner.settle_one(source, source.parameter)
    except Exception as error:  # a user's layout may raise anything, on one rank alone
        return problem(source.name, error)
    owned = settled.owned
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
    # What a layout places may be flat shards, of which a rank may have none.
    spread = compat.is_dtensor(source.parameter) and not settled.declared
    held = owned is not None
    return _Described(identity, source.name, source.owner, copied, held, spread, source.group)


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
    described = [_describe(source, planner, unnamed) for source in sources]
    mine = [entry for entry in described if isinstance(entry, _Described)]
    problems = [*problems, *(entry for entry in described if not isinstance(entry, _Described))]
    dtypes = {getattr(source.parameter, "dtype", None) for source in sources}
    wide = not dtypes.isdisjoint({torch.float64, torch.complex128})
    told = agree((mine, problems, settings, limits, wide), planner.world)
    verdict.raise_told(
        [(rank, wrong) for rank, (_, wrong, *_) in zip(planner.world.ranks, told, strict=True)]
    )
    distinct = _distinct(told, planner.world.ranks)
    verdict.raise_unlike([(asdict(value[2]), ranks) for value, ranks in distinct])
    accounts = [(value[0], ranks) for value, ranks in distinct]
    _check_groups(accounts)
    _check_names(accounts, list(zip(sources, mine, strict=True)), planner)
    everything = [entry for value, _ in distinct for entry in value[0] if entry.held]
    first = {entry.identity: entry for entry in reversed(everything)}
    known = {entry.identity: first[entry.identity] for entry in everything}
    copied = dict.fromkeys(entry.identity for entry in everything if entry.copied)
    number = {identity: index for index, identity in enumerate(copied)}
    names = _names(known.values(), settings.norms)
    keys = tuple(dict.fromkeys(names.values()))
    index = {key: position for position, key in enumerate(keys)}
    return Agreement(
        max((value[3] for value, _ in distinct), key=len),
        min(len(number), _MOST_SLOTS_EXACT if settings.exact else _MOST_SLOTS),
        keys if settings.norms is not None else (),
        [number.get(entry.identity, 0) for entry in mine],
        [index[names[entry.identity]] if entry.held else 0 for entry in mine],
        _tied(known.values()),
        any(value[4] for value, _ in distinct),
    )


def _check_groups(told: Sequence[tuple[Sequence[_Described], list[int]]]) -> None:
    """Raise if a named parameter is in other param groups on other ranks.

    Raises:
        ValueError: Names the parameter, the groups and the ranks.
    """
    found: dict[_Identity, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for entries, ranks in told:
        groups: dict[_Identity, list[int]] = defaultdict(list)  # two modules' may share a name
        for entry in entries:
            if entry.held and entry.owner is not None:
                groups[entry.identity].append(entry.group)
        for identity, held in groups.items():
            times = Counter(held).items()
            shown = [f"{group} ({n} times)" if n > 1 else str(group) for group, n in times]
            found[identity][", ".join(shown)] += ranks
    lines = [
        f"{identity.label} is in "
        + ", ".join(f"group {group} on rank {listed(ranks)}" for group, ranks in held.items())
        for identity, held in found.items()
        if len(held) > 1
    ]
    if lines:
        raise ValueError(
            f"param groups differ between ranks: {verdict.few(lines)}. Give all ranks the same "
            "parameters and groups in the same order"
        )


def _check_names(
    told: Sequence[tuple[Sequence[_Described], list[int]]],
    own: Sequence[tuple[Source, _Described]],
    planner: Planner,
) -> None:
    """Raise if a rank that a named DTensor's mesh spans lists nothing of its name.

    Args:
        told: Accounts, and the ranks that gave them.
        own: This rank's sources.
        planner: Knows which ranks they lie on.

    Raises:
        ValueError: Names the parameter and the ranks.
    """
    listing: dict[_Identity, list[int]] = defaultdict(list)
    named: dict[str, set[int]] = defaultdict(set)
    for entries, ranks in told:
        for entry in entries:
            named[entry.name].update(ranks)
            if entry.held and entry.spread and entry.owner is not None:
                listing[entry.identity] += ranks
    short = {identity for identity, ranks in listing.items() if len(set(ranks)) < identity.ranks}
    if not short:
        return
    lines = {}
    domains = {}
    for source, entry in own:
        owned = planner.settle_one(source, source.parameter).owned
        if entry.identity in short and owned is not None:
            domains[entry.identity] = owned.domain
    for known in reduce.gather(domains, planner.world):
        for identity, domain in known.items():
            missing = set(domain) - named[identity.label]
            if missing:
                lines[identity] = (
                    f"{identity.label}: it lies on rank {listed(domain)}, and rank "
                    f"{listed(missing)} lists no parameter of this name"
                )
    if lines:
        raise ValueError(
            f"{verdict.few(list(lines.values()))}. Give the clipper a DTensor on all ranks of its "
            "device mesh, and by one name"
        )


def _names(entries: Iterable[_Described], norms: str | None) -> dict[_Identity, str]:
    """Name every parameter (or module) of the job; others of its name elsewhere get a suffix.

    On other pipeline stages the stage's number; elsewhere a count of those of the same name.
    """
    entries = list(entries)
    bases = [e.owner if norms == "module" and e.owner is not None else e.name for e in entries]
    stages: dict[str, set[int]] = defaultdict(set)
    for base, entry in zip(bases, entries, strict=True):
        stages[base].add(-1 if entry.identity.stage is None else entry.identity.stage)
    same: dict[str, list[int]] = defaultdict(list)
    for entry in entries:
        if entry.identity.stage is None:
            same[entry.name].append(entry.identity.lowest)
    names = {}
    for base, entry in zip(bases, entries, strict=True):
        stage, lowest = entry.identity.stage, entry.identity.lowest
        if stage is None:
            number = sorted(same[entry.name]).index(lowest)
            suffix = f"@pp{number}" if number else ""
        else:
            suffix = f"@pp{stage}" if stage != min(stages[base]) else ""
        names[entry.identity] = base + suffix
    return names


def _tied(entries: Iterable[_Described]) -> list[str]:
    """Notice same-named parameters of one shape on several pipeline stages."""
    seen: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
    for entry in entries:
        if entry.identity.stage is not None and entry.owner is not None:
            seen[entry.name, entry.identity.shape].add(entry.identity.stage)
    shared = [name for (name, _), stages in seen.items() if len(stages) > 1]
    if not shared:
        return []
    more = f" and {len(shared) - 4} more" if len(shared) > 4 else ""
    return [
        f"{', '.join(shared[:4])}{more}: parameters of this name and shape are on several pipeline "
        "stages and are counted as different ones. If they are tied, say so with layout=, giving "
        "the mesh of those stages and Replicate(); for one stage's norm alone, use group="
    ]
