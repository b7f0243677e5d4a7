"""Exact sums on CUDA in Triton: one launch for each dtype, every element read once.

Each program adds its tiles up in lanes of its own, and the programs' lanes are summed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from shardclip.compat import numbers_in, on_host, to_device
from shardclip.math import exact, windows

from . import exact as plain
from . import exact_programs as programs

_PIECE = 64 * programs.TILE.value  # elements of a program
_WARPS = 1  # a tile's sums need no exchange between warps

# A tile adds up to 2^36 to a lane, and a lane must stay below 2^62 until its carries are taken.
MAX_ELEMENTS_HERE = programs.TILE.value << 26

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_REAL = {torch.complex64: torch.float32}


@dataclass(frozen=True)
class _Launch:
    """Tensors of one device and dtype.

    Attributes:
        indices: Which.
        dtype: Theirs, of real numbers.
        pieces: int64 (pieces, 3), on the device; see ``programs.sum_pieces``.
        buckets: int64 (pieces,), on the device: where each piece counts.
    """

    indices: list[int]
    dtype: torch.dtype
    pieces: Tensor
    buckets: Tensor

    @staticmethod
    def of(
        indices: list[int], tensors: Sequence[Tensor], buckets: Sequence[int], device: torch.device
    ) -> _Launch:
        sizes = on_host([numbers_in(tensors[index]) for index in indices], torch.int64)
        counts = -(-sizes // _PIECE)
        owner = torch.arange(len(indices), dtype=torch.int64, device="cpu").repeat_interleave(
            counts
        )
        before = (counts.cumsum(0) - counts)[owner]
        start = (torch.arange(len(owner), dtype=torch.int64, device="cpu") - before) * _PIECE
        stop = torch.minimum(start + _PIECE, sizes[owner])
        bucket = on_host([buckets[index] for index in indices], torch.int64)[owner]
        pieces = torch.stack([owner, start, stop], 1)
        dtype = _real(tensors[indices[0]].dtype)
        return _Launch(indices, dtype, to_device(pieces, device), to_device(bucket, device))

    def __call__(self, tensors: Sequence[Tensor], count: int, p: int) -> Tensor:
        """Return ``(count, windows.SINGLE.lanes)``, carries taken."""
        flat = [plain.flatten([tensors[index]], p) for index in self.indices]
        device = self.pieces.device
        table = to_device(on_host([tensor.data_ptr() for tensor in flat], torch.int64), device)
        pieces = len(self.pieces)
        found = torch.empty(pieces, programs.LANES.value, dtype=torch.int64, device=device)
        on_device: AbstractContextManager[object] = (
            torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        )
        if pieces:
            with on_device:
                programs.sum_pieces[(pieces,)](
                    table, self.pieces, found, _DTYPES[self.dtype], p, num_warps=_WARPS
                )
        lanes = torch.zeros(count, programs.LANES.value, dtype=torch.int64, device=device)
        lanes.index_add_(0, self.buckets, found)
        return exact.carry(lanes[:, : windows.SINGLE.lanes])


class ExactSums:
    """Sum |x| or x^2 per bucket, exactly; ``exact.ExactSums`` on CUDA, without a host sync.

    float64 and complex128 tensors are left to that one, with its host syncs.
    """

    each: Tensor | None = None

    def __init__(
        self,
        tensors: Sequence[Tensor],
        buckets: Sequence[int],
        count: int,
        window: windows.Window,
    ) -> None:
        """Make the tables; see ``exact.ExactSums``.

        Raises:
            ValueError: As there, and for more than 2^35 elements on one device.
        """
        self._count = count
        self._window = window
        self._home = tensors[0].device if tensors else torch.device("cpu")
        groups: dict[object, list[int]] = {}
        for index, tensor in enumerate(tensors):
            known = _real(tensor.dtype) in _DTYPES
            groups.setdefault((tensor.device, _real(tensor.dtype)) if known else None, []).append(
                index
            )
        self._others = groups.pop(None, [])
        self._plain = plain.ExactSums(
            [tensors[index] for index in self._others],
            [buckets[index] for index in self._others],
            count,
            window,
        )
        self._launches = []
        for indices in groups.values():
            elements = sum(numbers_in(tensors[index]) for index in indices)
            if elements > MAX_ELEMENTS_HERE:
                raise ValueError(
                    f"an exact norm holds up to 2^35 elements of a dtype on one device, got "
                    f"{elements}; pass exact=False"
                )
            device = tensors[indices[0]].device
            self._launches.append(_Launch.of(indices, tensors, buckets, device))

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor], p: float) -> Tensor:
        """Sum tensors like those that this was built for.

        Returns:
            int64 of shape ``(count, window.lanes)`` on the first tensor's device, every digit
            between -2^32 and 2^32.

        Raises:
            ValueError: See ``exact.check``.
        """
        others = [tensors[index] for index in self._others]
        total = to_device(self._plain(others, p), self._home)
        for launch in self._launches:
            lanes = exact.widen(launch(tensors, self._count, int(p)), windows.SINGLE, self._window)
            total = total + to_device(lanes, self._home)
        return exact.carry(total)


def _real(dtype: torch.dtype) -> torch.dtype:
    return _REAL.get(dtype, dtype)
