"""Power sums by torch's foreach calls, in float64: for CUDA, and the specification on CPU."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardclip.compat import to_device
from shardclip.norm import is_maximum


def power_sums(tensors: Sequence[Tensor], buckets: Sequence[int], count: int, p: float) -> Tensor:
    """Sum |x|^p per bucket; see ``kernels.power_sums``.

    float64 holds the square of every smaller dtype's number, so nothing overflows or underflows.
    Tensors of several devices are summed where they lie; the result is on the first one's device.
    """
    if not tensors:
        return torch.zeros(count, dtype=torch.float64)
    home = tensors[0].device
    out = torch.zeros(count, dtype=torch.float64, device=home)
    filled = [(t, b) for t, b in zip(tensors, buckets, strict=True) if t.numel()]
    for device in {t.device for t, _ in filled}:
        here = [(t, b) for t, b in filled if t.device == device]
        sums = torch.stack(_sums([t for t, _ in here], p)).to(home, non_blocking=True)
        index = to_device(torch.tensor([b for _, b in here]), home)
        if is_maximum(p):
            out.scatter_reduce_(0, index, sums, "amax")  # keeps NaN
        else:
            out.index_add_(0, index, sums)
    return out


def _sums(tensors: list[Tensor], p: float) -> list[Tensor]:
    if p == 0:
        # A NaN is no number to be counted: it makes the norm NaN, as for every other p.
        return [torch.where(t.isnan().any(), math.nan, t.count_nonzero()).double() for t in tensors]
    real = [t.abs() if t.is_complex() else t for t in tensors]
    narrow = [t if t.dtype.itemsize > 1 else t.float() for t in real]  # float8 has no norm
    norms = torch._foreach_norm(narrow, p, torch.float64)
    return list(norms) if is_maximum(p) or p == 1 else [n.pow(p) for n in norms]
