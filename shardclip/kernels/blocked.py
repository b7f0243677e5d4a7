"""Power sums on CPU: short float32 rows at memory bandwidth, combined in float64.

A row is so short that even its worst case (a large number first, then many small ones that round
away) stays below 1e-6; the rows are combined in float64. 16-bit gradients go through a float32
buffer that stays in cache. Where float32 cannot hold the squares (beyond 1e19,
below 1e-10), the bucket is summed again in float64: rare, and seen from the result alone.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardclip.norm import is_maximum

from . import foreach

_ROW = 256  # elements summed in float32, in at least 16 partial sums
_BUFFER = 1 << 19  # elements of float32 scratch: 2 MiB, which a core's cache holds about
_SMALL = 1 << 15  # tensors below this are packed together
# float32 squares lose at most 2^-126 an element: below this sum that could be seen.
_FAINT = 1e-20


def power_sums(tensors: Sequence[Tensor], buckets: Sequence[int], count: int, p: float) -> Tensor:
    """Sum |x|^p per bucket; see ``kernels.power_sums``."""
    if p not in (1, 2):
        return _elementwise(tensors, buckets, count, p)
    by_bucket: list[list[Tensor]] = [[] for _ in range(count)]
    for tensor, bucket in zip(tensors, buckets, strict=True):
        if tensor.numel():
            by_bucket[bucket].append(tensor)
    return torch.tensor([_bucket_sum(held, p) for held in by_bucket], dtype=torch.float64)


def _bucket_sum(tensors: list[Tensor], p: float) -> float:
    if not tensors:
        return 0.0
    total = 0.0
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # one dtype at a time can be packed
        flat = (_flatten(t, p) for t in tensors if t.dtype == dtype)
        total += math.fsum(_row_sums(run, p) for run in _runs(flat))
    if math.isfinite(total) and total > _FAINT:
        return total
    return _wide_sum(tensors, p)


def _flatten(tensor: Tensor, p: float) -> Tensor:
    """View as one dimension of real numbers, in storage order: a sum does not care."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj()) if p == 2 else tensor.abs()
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
    return tensor.reshape(-1)


def _runs(flat: Iterator[Tensor]) -> Iterator[Tensor]:
    """Pack small tensors of one dtype together; pass large ones on as they are."""
    pack: list[Tensor] = []
    packed = 0
    for tensor in flat:
        if tensor.numel() >= _SMALL:
            yield tensor
            continue
        pack.append(tensor)
        packed += tensor.numel()
        if packed >= _BUFFER:
            yield _cat(pack)
            pack, packed = [], 0
    if pack:
        yield _cat(pack)


def _cat(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _row_sums(flat: Tensor, p: float) -> float:
    """Sum |x|^p over one run, row by row, through the buffer where that is needed."""
    if p == 2 and flat.dtype in (torch.float32, torch.float64):
        return _sum_of_squares(flat)
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    buffer = torch.empty(min(_BUFFER, flat.numel()), dtype=wide)
    parts = []
    for block in torch.split(flat, _BUFFER):
        values = buffer[: block.numel()].copy_(block)
        if p == 2:
            parts.append(_sum_of_squares(values))
        else:
            parts.append(float(values.abs_().sum()))  # torch sums pairwise here
    return math.fsum(parts)


def _sum_of_squares(flat: Tensor) -> float:
    even = flat.numel() // _ROW * _ROW
    total = 0.0
    if even:
        norms = torch.linalg.vector_norm(flat[:even].view(-1, _ROW), dim=1).double()
        total += float(norms.dot(norms))
    if even < flat.numel():
        total += float(torch.linalg.vector_norm(flat[even:])) ** 2
    return total


def _wide_sum(tensors: list[Tensor], p: float) -> float:
    """Sum in float64: for what float32 cannot hold, and to see that zeros are zeros."""
    present = [t for t in tensors if bool(t.any())]
    return float(foreach.power_sums(present, [0] * len(present), 1, p)[0])


def _elementwise(tensors: Sequence[Tensor], buckets: Sequence[int], count: int, p: float) -> Tensor:
    if is_maximum(p) or p == 0:
        return foreach.power_sums(tensors, buckets, count, p)
    out = torch.zeros(count, dtype=torch.float64)
    for tensor, bucket in zip(tensors, buckets, strict=True):
        for block in torch.split(_flatten(tensor.detach(), p), _BUFFER):
            out[bucket] += block.double().abs().pow_(p).sum()
    return out
