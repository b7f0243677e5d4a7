"""Pure geometry: which ranks hold the same piece of a tensor, and which of them counts what.

Takes ranks, shapes and coordinates as plain numbers and needs no process group, so that layouts of
thousands of ranks are checked in one process. "Axis" is a mesh's, "dim" a tensor's.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product

# Ranks along an axis of this name hold different parameters, never copies.
STAGE_AXIS = "pp"

# Elements that one rank reads alone, rather than that each reads a sliver of them.
BLOCK = 1 << 15


@dataclass(frozen=True)
class Ownership:
    """Which ranks hold exactly this rank's piece of a tensor, and how they share the counting.

    Attributes:
        holders: Global ranks that hold the same piece, ascending, this rank among them; empty where
            this rank holds nothing.
        domain: Global ranks that hold any piece of the tensor.
        split: The holders share the reading; otherwise each reads the piece in full and counts
            1 / len(holders) of the sum.
        stage: This rank's coordinate on a left-out pipeline axis, if there is one.
    """

    holders: tuple[int, ...]
    domain: tuple[int, ...]
    split: bool = True
    stage: int | None = None

    @property
    def shared(self) -> bool:
        """Whether several ranks split the reading among them."""
        return self.split and len(self.holders) > 1


@dataclass(frozen=True)
class Mesh:
    """A device mesh as data: its ranks in row-major order, its shape, its axes' names."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tile:
    """One translate of a tensor's mesh inside its root mesh."""

    members: tuple[int, ...]
    holders: tuple[int, ...]  # of these, the ranks with the same piece as this rank


@dataclass(frozen=True)
class Place:
    """Where this rank's piece of a tensor lies: in its own mesh, and in the ranks left out of it.

    Attributes:
        own: The tensor's own mesh.
        left_out: Translates of it over the root mesh's other ranks, which hold copies or other
            parameters: geometry alone cannot tell.
        pieces: For each member of a tile, by position, which piece it holds.
        stage: Coordinate on the root mesh's pipeline axis, where the mesh does not span it.
        root: All ranks of the root mesh.
    """

    own: Tile
    left_out: tuple[Tile, ...]
    pieces: tuple[int, ...]
    stage: int | None
    root: tuple[int, ...]


def segment(numel: int, index: int, count: int) -> tuple[int, int]:
    """Return the half-open range of ``numel`` elements that the ``index``-th of ``count`` reads."""
    return numel * index // count, numel * (index + 1) // count


class Shares:
    """Which part of each piece this rank reads, balanced over all pieces of one set of holders.

    A piece is cut into as many equal parts as it has blocks, at most one for each holder; the
    holders that have least so far take one each. So no holder reads more than one block beyond its
    fair share. Every holder works this out alike, from the pieces' sizes in one order.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._queues: dict[int, tuple[tuple[int, ...], list[tuple[int, int]], int]] = {}

    def even(self, holders: tuple[int, ...], numel: int) -> tuple[int, int]:
        """Return which part this rank reads where all holders read one, whatever else they hold."""
        return (holders.index(self._rank) + numel) % len(holders), len(holders)

    def part(self, holders: tuple[int, ...], numel: int) -> tuple[int, int] | None:
        """Return which part of the next piece this rank reads, of how many; None: nothing.

        Args:
            holders: The ranks that hold it; one object for one set.
            numel: Its number of elements.
        """
        if id(holders) not in self._queues:
            # The first place depends on the set: not every set shall begin with its lowest rank.
            first = zlib.crc32(repr(holders).encode()) % len(holders)
            order = [*range(first, len(holders)), *range(first)]
            queue = [(0, place) for place in range(len(holders))]
            self._queues[id(holders)] = holders, queue, order.index(holders.index(self._rank))
        _, queue, mine = self._queues[id(holders)]
        count = min(len(holders), max(1, -(-numel // BLOCK)))
        if count == len(holders):
            return mine, count  # nobody's load changes against the others'
        part = None
        for index, (load, place) in enumerate([heappop(queue) for _ in range(count)]):
            heappush(queue, (load + numel // count, place))
            part = index if place == mine else part
        return None if part is None else (part, count)


def pieces_of(shape: Sequence[int], replicated: Sequence[bool]) -> tuple[int, ...]:
    """Number the pieces of a tensor over a mesh, row-major; replicated axes don't change them."""
    number = []
    for coordinate in product(*(range(size) for size in shape)):
        piece = 0
        for size, copied, position in zip(shape, replicated, coordinate, strict=True):
            piece = piece if copied else piece * size + position
        number.append(piece)
    return tuple(number)


def tile_offsets(positions: Sequence[int], length: int) -> list[int] | None:
    """Cover ``range(length)`` by translates of ``positions``, each number once.

    A slice of a row-major mesh (flattened and unflattened ones too) always tiles the rest of it,
    and the lowest uncovered number must begin the next translate.

    Returns:
        The translates' lowest numbers in ascending order, or None where it cannot be done.
    """
    lowest = min(positions)
    steps = [position - lowest for position in positions]
    reach = max(steps)
    covered = bytearray(length)
    offsets = []
    for start in range(length):
        if covered[start]:
            continue
        if start + reach >= length or any(covered[start + step] for step in steps):
            return None
        for step in steps:
            covered[start + step] = 1
        offsets.append(start)
    return offsets


def _without_other_stages(
    root: Mesh, members: Sequence[int], rank: int
) -> tuple[tuple[int, ...], int | None]:
    """Return the root's ranks of this rank's pipeline stage, and the stage's number."""
    if STAGE_AXIS not in root.names:
        return root.ranks, None
    axis = root.names.index(STAGE_AXIS)
    inner = 1
    for size in root.shape[axis + 1 :]:
        inner *= size
    stages = {r: position // inner % root.shape[axis] for position, r in enumerate(root.ranks)}
    if len({stages[member] for member in members}) > 1:  # the tensor itself spans the axis
        return root.ranks, None
    return tuple(r for r in root.ranks if stages[r] == stages[rank]), stages[rank]


def place(mesh: Mesh, replicated: Sequence[bool], root: Mesh, rank: int) -> Place:
    """Find who holds what of a tensor on ``mesh``, a sub-mesh of ``root`` or ``root`` itself.

    Args:
        mesh: The tensor's mesh.
        replicated: For each axis of it, whether the tensor is replicated over it.
        root: The mesh that ``mesh`` was cut from.
        rank: This rank, a member of ``mesh``.
    """
    pieces = pieces_of(mesh.shape, replicated)
    mine = pieces[mesh.ranks.index(rank)]
    held = [index for index, piece in enumerate(pieces) if piece == mine]
    own = Tile(mesh.ranks, tuple(mesh.ranks[index] for index in held))
    if mesh.ranks == root.ranks or not set(mesh.ranks) <= set(root.ranks):
        return Place(own, (), pieces, None, root.ranks)
    ranks, stage = _without_other_stages(root, mesh.ranks, rank)
    where = {r: position for position, r in enumerate(ranks)}
    positions = [where[r] for r in mesh.ranks]
    lowest = min(positions)
    tiles = []
    for offset in tile_offsets(positions, len(ranks)) or ():
        if offset == lowest:
            continue
        moved = tuple(ranks[position - lowest + offset] for position in positions)
        tiles.append(Tile(moved, tuple(moved[index] for index in held)))
    return Place(own, tuple(tiles), pieces, stage, root.ranks)


def own(where: Place, group: frozenset[int], having: frozenset[int] | None = None) -> Ownership:
    """Decide which left-out ranks hold copies, and keep to the ranks of ``group``.

    Args:
        where: What geometry says.
        group: The ranks that take part in the reduction.
        having: The ranks that have this parameter, where that is known: left-out tiles without
            it hold other parameters. Otherwise each tile holds copies.

    Raises:
        ValueError: Pieces of the tensor lie on ranks outside the group, so that no reduction over
            the group can give the tensor's norm.
    """
    copies = (t for t in where.left_out if having is None or not having.isdisjoint(t.members))
    tiles = [where.own, *copies]
    inside = {
        piece
        for tile in tiles
        for member, piece in zip(tile.members, where.pieces, strict=True)
        if member in group
    }
    if len(inside) < max(where.pieces) + 1:
        raise ValueError(
            "pieces of it lie on ranks outside the group; pass a group that spans its mesh"
        )
    holders = sorted({r for tile in tiles for r in tile.holders if r in group})
    domain = sorted({r for tile in tiles for r in tile.members if r in group})
    return Ownership(tuple(holders), tuple(domain), stage=where.stage)
