"""What each rank tells of its parameters, and what follows when all ranks' accounts are there."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardclip import compat
from shardclip.comm import reduce
from shardclip.errors import problem
from shardclip.layout import Planner, Source

from .inspection import few, listed


@dataclass(frozen=True)
class Identity:
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
class Described:
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

    identity: Identity
    name: str
    owner: str | None
    copied: bool
    held: bool
    spread: bool
    group: int


def describe(
    source: Source, planner: Planner, unnamed: Counter[object]
) -> Described | tuple[str, str]:
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
    identity = Identity(label, lowest, len(domain), planner.digest(domain), stage, shape)
    copied = owned is not None and len(owned.holders) > 1
    # What a layout places may be flat shards, of which a rank may have none.
    spread = compat.is_dtensor(source.parameter) and not settled.declared
    held = owned is not None
    return Described(identity, source.name, source.owner, copied, held, spread, source.group)


def check_groups(told: Sequence[tuple[Sequence[Described], list[int]]]) -> None:
    """Raise if a named parameter is in other param groups on other ranks.

    Raises:
        ValueError: Names the parameter, the groups and the ranks.
    """
    found: dict[Identity, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for entries, ranks in told:
        groups: dict[Identity, list[int]] = defaultdict(list)  # two modules' may share a name
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
            f"param groups differ between ranks: {few(lines)}. Give all ranks the same "
            "parameters and groups in the same order"
        )


def check_names(
    told: Sequence[tuple[Sequence[Described], list[int]]],
    own: Sequence[tuple[Source, Described]],
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
    listing: dict[Identity, list[int]] = defaultdict(list)
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
            f"{few(list(lines.values()))}. Give the clipper a DTensor on all ranks of its "
            "device mesh, and by one name"
        )


def names_of(entries: Iterable[Described], norms: str | None) -> dict[Identity, str]:
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


def tied(entries: Iterable[Described]) -> list[str]:
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
