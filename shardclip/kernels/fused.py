"""The Triton kernels: power sums and scaling, each in one launch over a whole list of tensors.

Sums are kept block by block and combined in a fixed order, without atomics: the same tensors at
addresses of the same alignment give the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardclip.compat import in_storage_order, on_host, to_device

from . import foreach, programs

INTERPRETED = not isinstance(programs.combine, triton.JITFunction)
"""Whether the programs run on the host, as TRITON_INTERPRET=1 asks for: for tests."""

_KINDS = {
    torch.bfloat16: (programs.BFLOAT16.value, tl.bfloat16),
    torch.float16: (programs.FLOAT16.value, tl.float16),
    torch.float32: (programs.FLOAT32.value, tl.float32),
    torch.float64: (programs.FLOAT64.value, tl.float64),
}
_POWERS = (0, 1, 2, math.inf)
_PROGRAMS = 8  # of the scaling, for each multiprocessor: as many as find room on one

# What a CUDA graph reads at every replay must outlive it, and nothing tells when it goes.
_captured: list[object] = []


@dataclass(frozen=True)
class _Blocks:
    """How a list of tensors is cut: tables on the device, as ``programs.sum_blocks`` takes them.

    Attributes:
        tensors: int64 (tensors, 3).
        blocks: int64 (blocks, 2).
        dtype: Triton's, of all tensors, if it is one.
        counts: How many blocks each tensor has, on the host.
    """

    tensors: Tensor
    blocks: Tensor
    dtype: Any
    counts: Tensor

    @staticmethod
    def cut(
        sizes: Sequence[tuple[int, torch.dtype]], order: Sequence[int], device: torch.device
    ) -> _Blocks:
        """Cut tensors of these sizes and dtypes, those that come first in ``order`` first."""
        if _capturing(device):
            raise RuntimeError(
                "shardclip sees these tensors for the first time, and what it prepares for them "
                "cannot be part of a CUDA graph; run the same step once before capturing it"
            )
        rows = [(numel, _KINDS[dtype][0], dtype.itemsize) for numel, dtype in sizes]
        tensors = on_host(rows, torch.int64).view(-1, 3)
        numel, _, itemsize = tensors.unbind(1)
        # Wherever it lies: a tensor may begin up to one piece after its first block.
        longest = numel + programs.ALIGNMENT.value // itemsize - 1
        counts = torch.where(numel > 0, -(-longest // programs.BLOCK.value), 0)
        places = on_host(order, torch.int64)
        held = counts[places]
        owners = places.repeat_interleave(held)
        before = (held.cumsum(0) - held).repeat_interleave(held)
        starts = (torch.arange(len(owners), device="cpu") - before) * programs.BLOCK.value
        blocks = torch.stack([owners, starts], 1)
        dtypes = {_KINDS[dtype][1] for _, dtype in sizes}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        return _Blocks(to_device(tensors, device), to_device(blocks, device), dtype, counts)


class PowerSums:
    """Sum |x|^p per bucket; see ``kernels.build``. All tensors lie on one device.

    Two launches: one reads the tensors, one combines the blocks' sums. Sixteen numbers at a time
    are added in float32, these sums in float64: the error is at most eight float32 roundings. A
    block whose squares float32 cannot hold is summed again in float64. p other than 0, 1, 2 and
    inf, and complex tensors with p other than 2, are left to ``foreach``.

    No host sync. A call can be captured in a CUDA graph after one like it, which compiles.

    Attributes:
        each: float64, the last call's sum for each tensor.
        nonfinite: float64, how many numbers of each tensor were not finite in the last call (of a
            complex one, each has two); None where ``foreach`` made it.
        nonfinite_in_buckets: The same for each bucket.
    """

    def __init__(self, tensors: Sequence[Tensor], buckets: Sequence[int], count: int) -> None:
        self.each: Tensor | None = None
        self.nonfinite: Tensor | None = None
        self.nonfinite_in_buckets: Tensor | None = None
        self._plain = foreach.PowerSums(tensors, buckets, count)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._complex = any(tensor.is_complex() for tensor in tensors)
        self._total = len(tensors)
        self._blocks: _Blocks | None = None
        sizes = [_size(tensor) for tensor in tensors]
        if all(dtype in _KINDS for _, dtype in sizes):
            # Blocks of one bucket stand side by side, as those of one tensor do.
            order = sorted(range(len(sizes)), key=lambda index: buckets[index])
            self._blocks = _Blocks.cut(sizes, order, self._device)
            ranges = _ranges(self._blocks.counts, order, buckets, count)
            self._ranges = to_device(ranges, self._device)

    def __call__(self, tensors: Sequence[Tensor], p: float) -> Tensor:
        """Sum tensors like those that this was built for."""
        if self._blocks is None or p not in _POWERS or (self._complex and p != 2):
            return self._by_foreach(tensors, p)
        cut, held = self._blocks, [_flat(tensor) for tensor in tensors]
        # Each is a tensor of its own: its alignment is then always the same, and known.
        parts = [self._empty(len(cut.blocks)) for _ in range(2)]
        sums = [self._empty(len(self._ranges)) for _ in range(2)]
        with _on(self._device):
            table = _addresses(held, self._device, self)
            if len(cut.blocks):
                programs.sum_blocks[(len(cut.blocks),)](
                    table,
                    cut.tensors,
                    cut.blocks,
                    *parts,
                    cut.dtype,
                    float(p),
                    num_warps=programs.WARPS,
                )
            programs.combine[(len(self._ranges),)](
                self._ranges, *parts, *sums, float(p), num_warps=programs.WARPS
            )
        (self.each, totals), (self.nonfinite, self.nonfinite_in_buckets) = (
            column.tensor_split([self._total]) for column in sums
        )
        return totals

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float64, device=self._device)

    def _by_foreach(self, tensors: Sequence[Tensor], p: float) -> Tensor:
        totals = self._plain(tensors, p)
        self.each, self.nonfinite, self.nonfinite_in_buckets = self._plain.each, None, None
        return totals


def multiply_(tensors: Sequence[Tensor], coef: Tensor) -> None:
    """Multiply in place by a 0-dim tensor, in one launch; see ``foreach.multiply_``.

    Where the coefficient is exactly 1, the tensors are neither read nor written. The product is
    taken in float32, or float64 for float64 tensors, and rounded once more to a 16-bit dtype. No
    host sync. A call can be captured in a CUDA graph after one like it, which compiles.

    Args:
        tensors: All on one device; those with gaps or overlaps are left to ``foreach``.
        coef: float64, on that device.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    views = [_view(tensor) for tensor in filled]
    held = [view for view in views if view is not None]
    others = [tensor for tensor, view in zip(filled, views, strict=True) if view is None]
    foreach.multiply_(others, coef)
    if not held:
        return
    device = held[0].device
    blocks = _cut_once(tuple(_size(view) for view in held), device)
    count = len(blocks.blocks)
    torch.autograd.graph.increment_version(held)  # autograd does not see the launch
    with _on(device):
        programs.multiply_blocks[(min(count, _programs(device)),)](
            _addresses(held, device, blocks),
            blocks.tensors,
            blocks.blocks,
            count,
            coef.double(),
            blocks.dtype,
            num_warps=programs.WARPS,
        )


@functools.lru_cache(maxsize=64)
def _cut_once(sizes: tuple[tuple[int, torch.dtype], ...], device: torch.device) -> _Blocks:
    return _Blocks.cut(sizes, range(len(sizes)), device)


def _ranges(counts: Tensor, order: Sequence[int], buckets: Sequence[int], count: int) -> Tensor:
    """Return where the blocks of each tensor, then of each bucket, start and stop."""
    places = on_host(order, torch.int64)
    stops = torch.empty_like(counts).index_copy_(0, places, counts[places].cumsum(0))
    sizes = torch.zeros(count, dtype=torch.int64, device="cpu")
    sizes.index_add_(0, on_host(list(buckets), torch.int64), counts)
    lengths = torch.cat([counts, sizes])
    stops = torch.cat([stops, sizes.cumsum(0)])
    return torch.stack([stops - lengths, stops], 1)


def _size(tensor: Tensor) -> tuple[int, torch.dtype]:
    """Return how many real numbers a tensor has, and their dtype."""
    if tensor.is_complex():
        return 2 * tensor.numel(), tensor.dtype.to_real()
    return tensor.numel(), tensor.dtype


def _flat(tensor: Tensor) -> Tensor:
    """Return the tensor's numbers without gaps, in any order; a copy only where there are gaps."""
    if tensor.is_contiguous() and not tensor.is_complex():
        return tensor
    return _in_storage_order(tensor).contiguous()


def _view(tensor: Tensor) -> Tensor | None:
    """Return the tensor's numbers without gaps, not a copy; None where there is no such view."""
    if tensor.is_contiguous() and tensor.dtype in _KINDS:
        return tensor
    ordered = _in_storage_order(tensor)
    return ordered if ordered.is_contiguous() and ordered.dtype in _KINDS else None


def _in_storage_order(tensor: Tensor) -> Tensor:
    """View as real numbers, in the order in which they are stored.

    Conjugation and negation, which torch may do later, change no magnitude and no factor.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    return in_storage_order(tensor)


def _addresses(tensors: Sequence[Tensor], device: torch.device, reader: object) -> Tensor:
    """Return the tensors' addresses on the device, copied there without a host sync."""
    held = on_host([tensor.data_ptr() for tensor in tensors], torch.int64)
    if device.type == "cpu":
        return held
    held = held.pin_memory()
    if _capturing(device):
        _captured.append((held, reader))
    return held.to(device, non_blocking=True)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on this device's current stream; without a device, through the interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
