"""What the ranks agree on when a GradClipper is built: names, who holds what, and lanes."""

import hashlib
import pickle
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import reduce, verdict
from .gradients import Source
from .notices import warn_once
from .ownership import Tile
from .plan import Planner, Settled
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
    values = {d: pickle.loads(v) for d, v in zip(digests, told, strict=True) if v is not None}
    return [values[digest] for digest in digests]


def _entry(source: Source) -> tuple[str, tuple[int, ...], str]:
    tensor = source.parameter
    return source.name, tuple(getattr(tensor, "shape", ())), str(getattr(tensor, "dtype", ""))


def settle(sources: Sequence[Source], planner: Planner) -> None:
    """Tell the planner by names which left-out ranks hold copies.

    Ranks without a parameter of the same name, shape and dtype hold other parameters.
    """
    named = [_entry(source) for source in sources if source.owner is not None]
    told = agree(named, planner.world)
    having: dict[Any, set[int]] = defaultdict(set)
    for rank, entries in zip(planner.world.ranks, told, strict=True):
        for entry in entries:
            having[entry].add(rank)

    def is_copy(source: Source) -> Callable[[Tile], bool] | None:
        if source.owner is None:
            return None
        ranks = having[_entry(source)]
        return lambda tile: not ranks.isdisjoint(tile.members)

    planner.settle = is_copy


@dataclass(frozen=True)
class _Identity:
    """One parameter of the whole job, as each rank that holds any of it describes it alike."""

    name: str
    owner: str
    lowest: int
    ranks: int
    digest: int
    stage: int | None
    shape: tuple[int, ...]


def _identity(source: Source, settled: Settled) -> tuple[_Identity, bool]:
    owned = settled.owned
    name, shape, _ = _entry(source)
    owner = source.name if source.owner is None else source.owner
    if owned is None:
        return _Identity(name, owner, -1, 0, 0, None, shape), False
    digest = zlib.crc32(repr(owned.domain).encode())
    if source.ownership is not None or owned.stage is None:
        shape = ()  # local shapes differ between the ranks that share a plain tensor
    known = _Identity(name, owner, owned.domain[0], len(owned.domain), digest, owned.stage, shape)
    return known, len(owned.holders) > 1


def _describe(source: Source, planner: Planner) -> tuple[Any, Any]:
    """Return a source's identity and whether it has copies, or an error's type and text."""
    try:
        if not isinstance(source.parameter, Tensor):
            raise TypeError("is no tensor; give tensors or (name, tensor) pairs")
        return _identity(source, planner.settle_one(source, source.parameter))
    except Exception as error:  # a user's layout may raise anything, on one rank alone
        return type(error).__name__, f"{source.name}: {error}"


def conclude(
    sources: Sequence[Source], planner: Planner, groups: int, norms: str | None
) -> Agreement:
    """Agree on lanes for everything that every rank's step has to send.

    Raises:
        ValueError, TypeError: On every rank alike, if any rank's layout is wrong.
    """
    described = [_describe(source, planner) for source in sources]
    mine = [entry for entry in described if isinstance(entry[0], _Identity)]
    problems = [entry for entry in described if not isinstance(entry[0], _Identity)]
    told = agree((mine, problems, groups), planner.world)
    verdict.raise_told(
        [(rank, wrong) for rank, (_, wrong, _) in zip(planner.world.ranks, told, strict=True)]
    )
    everything = list(dict.fromkeys(identity for entries, _, _ in told for identity, _ in entries))
    _warn_if_tied(everything, planner)
    copied = dict.fromkeys(i for entries, _, _ in told for i, has_copies in entries if has_copies)
    number = {identity: index for index, identity in enumerate(copied)}
    names = _names(everything, norms)
    keys = tuple(dict.fromkeys(names.values()))
    index = {key: position for position, key in enumerate(keys)}
    return Agreement(
        max(count for _, _, count in told),
        max(1, min(len(number), _MOST_SLOTS)),
        keys if norms is not None else (),
        [number.get(identity, 0) for identity, _ in mine],
        [index[names[identity]] for identity, _ in mine],
    )


def _names(identities: Sequence[_Identity], norms: str | None) -> dict[_Identity, str]:
    """Name every parameter of the job; others of the same name elsewhere get a suffix."""
    by_name: dict[str, list[_Identity]] = defaultdict(list)
    for identity in identities:
        by_name[identity.name].append(identity)
    names = {}
    for name, same in by_name.items():
        same.sort(key=lambda i: (-1 if i.stage is None else i.stage, i.lowest))
        for index, identity in enumerate(same):
            number = index if identity.stage is None else identity.stage
            suffix = f"@pp{number}" if index else ""
            base = identity.owner if norms == "module" else name
            names[identity] = base + suffix
    return names


def _warn_if_tied(identities: Sequence[_Identity], about: object) -> None:
    """Warn of same-named parameters of one shape on several pipeline stages."""
    seen: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
    for identity in identities:
        if identity.stage is not None:
            seen[identity.name, identity.shape].add(identity.stage)
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
