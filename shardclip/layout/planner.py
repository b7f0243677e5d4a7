"""Who holds what: ownership of this rank's sources, over one group of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from shardclip import compat
from shardclip.comm import World

from . import adapters
from .ownership import Ownership, own
from .sources import Layout, Source


@dataclass(frozen=True)
class Settled:
    """Who holds a piece (None: not this rank), whether a layout said so, which ranks it knows."""

    owned: Ownership | None
    declared: bool
    known: tuple[int, ...]


class Planner:
    """Works out ownership for this rank's sources, over one group of ranks."""

    def __init__(self, world: World, layout: Layout) -> None:
        self.world = world
        self.layout = layout
        self.having: Callable[[Source], frozenset[int] | None] = lambda source: None
        self.group = frozenset(world.ranks)
        self.everyone = tuple(sorted(world.ranks))
        self._owned: dict[tuple[int, int], tuple[object, object, Ownership]] = {}
        self._digests: dict[int, tuple[tuple[int, ...], int]] = {}
        self._sets: dict[tuple[int, ...], tuple[int, ...]] = {self.everyone: self.everyone}

    def settle_one(self, source: Source, tensor: Tensor) -> Settled:
        """Tell who holds this rank's piece of a tensor.

        Raises:
            ValueError: The layout is wrong, or the group does not hold all of the tensor.
        """
        given = source.ownership
        if given is not None:
            if not self.group.issuperset(given.domain):
                raise ValueError("its shards lie on ranks outside the group; pass a larger group")
            owned = self._once(given, None, lambda: given)
            return Settled(owned, False, owned.domain)
        where, declared = adapters.place(source, tensor, self.layout, self.world.rank)
        having = self.having(source)
        if where is not None:
            owned = self._once(where, having, lambda: own(where, self.group, having))
            return Settled(owned, declared, where.root)
        if declared and not compat.is_dtensor(tensor) and tensor.numel():
            raise ValueError("layout gives it a mesh that this rank is not on, but it is here")
        if declared or compat.is_dtensor(tensor):
            return Settled(None, declared, ())
        owned = self._once(self, having, lambda: self._plain(having))
        return Settled(owned, False, self.everyone)

    def _once(self, what: object, having: object, work_out: Callable[[], Ownership]) -> Ownership:
        """Work an ownership out once for each place and set of ranks, compared by identity.

        Equal sets become one object, so that thousands of ranks need not be compared.
        """
        key = id(what), id(having)
        if key not in self._owned:
            owned = work_out()
            domain = self._sets.setdefault(owned.domain, owned.domain)
            holders = self._sets.setdefault(owned.holders, owned.holders)
            self._owned[key] = what, having, replace(owned, domain=domain, holders=holders)
        return self._owned[key][-1]

    def _plain(self, having: frozenset[int] | None) -> Ownership:
        holders = self.everyone
        if having is not None:
            holders = tuple(sorted(self.group & (having | {self.world.rank})))
        return Ownership(holders, holders, split=False)

    def digest(self, domain: tuple[int, ...]) -> int:
        """Return a number for a set of ranks, the same on every rank; 0 for the whole group."""
        if id(domain) not in self._digests:
            self._digests[id(domain)] = domain, zlib.crc32(repr(domain).encode())
        return 0 if domain is self.everyone else self._digests[id(domain)][1]
