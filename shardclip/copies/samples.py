"""Which values of a copied tensor are compared, and how they are folded into a few numbers.

A gradient may be zero nearly everywhere, as an embedding's is but for the rows of a step's tokens.
So the sample follows the tensor's shape: runs of ``LANES`` neighbours, so close that each row of
the tensor has one, shifted from row to row so that nearly each column has one, too. It never
follows the values: then noise beside a zero could choose other values on each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import torch
from torch import Tensor

from shardclip.compat import numbers_in, on_host, real_view, to_device

LANES = 8  # what a sample is folded into: a run has one value for each
_RUNS = 8  # in a block
_BLOCK = _RUNS * LANES  # values that are folded first; a tensor of fewer is compared in full
_MOST = 1 << 17  # runs, where a tensor's rows do not ask for more: a million values
_CHUNK = 1 << 17  # values that go through together: they stay in cache
_CHUNK_ELSEWHERE = 1 << 24

Extent = tuple[int, int]
"""How many real numbers a tensor has, and how many of them are a row; 1: nobody knows."""


def extent(tensor: Tensor, shape: Sequence[int]) -> Extent:
    """Return the extent of a local tensor that is, or lies flat inside, one of this shape.

    The last dim is a row, or as many dims as make one: of a convolution all but the first.
    """
    sizes = [size for size in shape if size != 1]
    if len(sizes) < 2:
        return numbers_in(tensor), 1
    enough = LANES if len(sizes) == 3 else _BLOCK
    columns = sizes.pop()
    while len(sizes) > 1 and columns < enough:
        columns *= sizes.pop()
    return numbers_in(tensor), columns * (2 if tensor.is_complex() else 1)


@lru_cache(maxsize=4096)
def spacing(numel: int, columns: int) -> int:
    """Return how far it is from one run to the next.

    At most a row, so that each row has a run's worth of values. ``per_row`` of these steps are a
    few columns less than a row: over all rows the runs then meet all columns, with about as many
    runs as there are rows, or as it takes to cover the columns once.
    """
    rows = max(1, -(-numel // columns))
    step = LANES
    for per_row in count(-(-columns // (LANES * rows))):
        shorter = (columns - -(-columns // (per_row * rows))) // per_row
        if shorter <= LANES:
            break
        if columns - per_row * shorter <= LANES:
            step = shorter
            break
    most = numel if columns == 1 else columns - 1
    step = max(step, min(numel // _MOST, most))
    return min(step, (numel - LANES) // (_RUNS - 1))  # a block fits


@lru_cache(maxsize=1)
def _signs() -> Tensor:
    """Return ``(_RUNS, LANES)`` of +-1: no two runs have the same, nor the opposite."""
    numbers = on_host([0x82, 0x1D, 0x1A, 0xA1, 0x51, 0x43, 0x34, 0x39], torch.int64)
    bits = numbers.unsqueeze(1) >> torch.arange(LANES, dtype=torch.int64, device="cpu") & 1
    return 1 - 2 * bits


def weights(keys: Tensor, places: Tensor) -> Tensor:
    """Return float64 weights that look random and are 1 in the mean square, the same everywhere.

    Not just +-1: a value that stands at another place changes all lanes but by a rare chance.

    Args:
        keys: int64; tensors of other keys have other weights.
        places: int64, of the same shape: where in the tensor.
    """
    h = (keys + places * 0x85EBCA77 + 1) & 0xFFFFFFFF
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
        h = ((h ^ (h >> shift)) * factor) & 0xFFFFFFFF  # a 32-bit integer hash
    sizes = (1 + (h >> 16).double() / (1 << 16)) * (3 / 7) ** 0.5  # 0.65 to 1.31
    return torch.where((h >> 7 & 1).bool(), -sizes, sizes)


@dataclass(frozen=True)
class _Piece:
    """Blocks of one tensor that lie evenly: where they begin, their number, the runs' distance."""

    tensor: int
    begin: int
    blocks: int
    step: int

    def of(self, flat: Tensor) -> Tensor:
        """View them: ``(blocks, _RUNS, LANES)``."""
        return flat.as_strided(
            (self.blocks, _RUNS, LANES),
            (_RUNS * self.step, self.step, 1),
            flat.storage_offset() + self.begin,
        )


def pieces(tensor: int, extent: Extent) -> list[_Piece]:
    """List the blocks of a tensor of at least a block."""
    numel, _ = extent
    step = spacing(*extent)
    blocks = ((numel - LANES) // step + 1) // _RUNS
    found = [_Piece(tensor, 0, blocks, step)]
    if (blocks * _RUNS) * step < numel:  # more is left than lies between two runs
        found.append(_Piece(tensor, numel - LANES - (_RUNS - 1) * step, 1, step))
    return found


def _chunks(listed: Sequence[_Piece], most: int) -> list[list[_Piece]]:
    """Cut into lists of at most so many blocks."""
    made: list[list[_Piece]] = []
    room = 0
    for piece in listed:
        done = 0
        while done < piece.blocks:
            if not room:
                made.append([])
                room = most
            blocks = min(room, piece.blocks - done)
            begin = piece.begin + done * _RUNS * piece.step
            made[-1].append(_Piece(piece.tensor, begin, blocks, piece.step))
            done, room = done + blocks, room - blocks
    return made


class Sampler:
    """Folds samples of tensors like those that it was made for, with weights of their own."""

    def __init__(
        self, extents: Sequence[Extent], keys: Sequence[int], device: torch.device
    ) -> None:
        """Take the tensors' extents and keys, in one order; fold on this device."""
        self._device = device
        self._count = len(extents)
        self._short = [i for i, (numel, _) in enumerate(extents) if 0 < numel < _BLOCK]
        long = [i for i, (numel, _) in enumerate(extents) if numel >= _BLOCK]
        listed = [piece for i in long for piece in pieces(i, extents[i])]
        most = _CHUNK if device.type == "cpu" else _CHUNK_ELSEWHERE
        self._chunks = _chunks(listed, most // _BLOCK)
        blocks = dict.fromkeys((*long, *self._short), 0)
        for piece in listed:
            blocks[piece.tensor] += piece.blocks
        blocks.update(dict.fromkeys(self._short, 1))
        self._direct = list(blocks) == list(range(self._count)) and set(blocks.values()) <= {1}
        places = [
            row * _BLOCK + i for row, t in enumerate(self._short) for i in range(extents[t][0])
        ]
        self._places = to_device(on_host(places, torch.int64), device)
        self._spread(blocks, keys)
        scales = [
            (extents[i][0] / (_BLOCK * blocks[i])) ** 0.5 if extents[i][0] >= _BLOCK else 1.0
            for i in range(self._count)
        ]
        self._scales = to_device(on_host(scales).unsqueeze(1), device)
        self._signs: dict[torch.dtype, Tensor] = {}

    def _spread(self, blocks: dict[int, int], keys: Sequence[int]) -> None:
        """Make the tables of each block's tensor and weights, on the device: they may be large."""
        rows = [(tensor, number, keys[tensor]) for tensor, number in blocks.items()]
        table = to_device(on_host(rows, torch.int64).view(-1, 3), self._device)
        total = sum(blocks.values())
        number = table[:, 1]
        first = number.cumsum(0) - number
        # With its size given, repeating waits for nothing.
        owner, key, first = (
            column.repeat_interleave(number, output_size=total)
            for column in (table[:, 0], table[:, 2], first)
        )
        block = torch.arange(total, dtype=torch.int64, device=self._device) - first
        lane = torch.arange(LANES, dtype=torch.int64, device=self._device)
        self._owners = owner
        self._weights = weights(key.unsqueeze(1), block.unsqueeze(1) * LANES + lane)

    def fold(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return ``(tensors, LANES)`` float64, whose sum of squares estimates each tensor's.

        It is a linear function of the tensors, whatever their strides. No host sync.
        """
        flats = [_flat(tensor) for tensor in tensors]
        sums = [
            self._folded([piece.of(flats[piece.tensor]) for piece in chunk])
            for chunk in self._chunks
        ]
        if self._short:
            sums.append(self._folded([self._padded([flats[i] for i in self._short])]))
        out = torch.zeros(self._count, LANES, dtype=torch.float64, device=self._device)
        if not sums:
            return out
        folded = (sums[0] if len(sums) == 1 else torch.cat(sums)).mul_(self._weights)
        out = folded if self._direct else out.index_add_(0, self._owners, folded)
        return out.mul_(self._scales)

    def _folded(self, views: Sequence[Tensor]) -> Tensor:
        """Sum the runs of each block with their signs: ``(blocks, LANES)``."""
        values = self._joined(views)
        if values.dtype not in self._signs:
            self._signs[values.dtype] = to_device(_signs().to(values.dtype), self._device)
        return values.mul_(self._signs[values.dtype]).sum(1, dtype=torch.float64)

    def _padded(self, flats: Sequence[Tensor]) -> Tensor:
        """Lay short tensors into blocks of their own, followed by zeros."""
        values = self._joined([flat.reshape(-1) for flat in flats])
        empty = values.new_zeros(len(flats) * _BLOCK)
        return empty.index_copy_(0, self._places, values).view(-1, _RUNS, LANES)

    def _joined(self, views: Sequence[Tensor]) -> Tensor:
        if any(view.device != self._device for view in views):
            views = [view.to(self._device) for view in views]
        return torch.cat(list(views))


def _flat(tensor: Tensor) -> Tensor:
    """Return real numbers in logical order without gaps; a copy only where there are gaps."""
    return (real_view(tensor) if tensor.is_complex() else tensor).contiguous()


def placed(local: Tensor, values: Tensor) -> Tensor:
    """Return a sparse gradient's values times weights of their places: rows may be swapped.

    Args:
        local: The gradient; a strided one's values are returned as they are.
        values: Its values, duplicates added up.
    """
    if local.layout == torch.strided:
        return values
    indices = torch.Tensor.to_sparse(local).coalesce().indices()
    odd = torch.arange(len(indices), dtype=torch.int64, device=indices.device) * 0xC2B2AE36 + 1
    places = (indices * odd.unsqueeze(1)).sum(0) & 0xFFFFFFFF
    by_half = weights(torch.zeros_like(places), places) / 2  # below 1: nothing overflows
    return values * by_half.to(values.dtype).view(-1, *[1] * (values.dim() - 1))
