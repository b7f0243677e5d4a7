"""Power sums and products by torch's foreach calls: where Triton is not, and the specification."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardclip.compat import on_host, real_view, to_device
from shardclip.math import is_maximum


class PowerSums:
    """Sum |x|^p per bucket; see ``kernels.build``.

    In float64, which holds the square of every smaller dtype's number: nothing overflows.
    Tensors of several devices are summed where they lie; the result is on the first one's device.
    """

    def __init__(self, tensors: Sequence[Tensor], buckets: Sequence[int], count: int) -> None:
        self.each: Tensor | None = None
        self._count = count
        self._total = len(tensors)
        self._home = tensors[0].device if tensors else torch.device("cpu")
        filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]
        self._here: list[tuple[list[int], Tensor, Tensor]] = []
        for device in dict.fromkeys(tensors[index].device for index in filled):
            chosen = [index for index in filled if tensors[index].device == device]
            held = on_host([buckets[index] for index in chosen], torch.int64)
            places = to_device(on_host(chosen, torch.int64), self._home)
            self._here.append((chosen, places, to_device(held, self._home)))

    def __call__(self, tensors: Sequence[Tensor], p: float) -> Tensor:
        """Sum tensors like those that this was built for."""
        out = torch.zeros(self._count, dtype=torch.float64, device=self._home)
        self.each = torch.zeros(self._total, dtype=torch.float64, device=self._home)
        for chosen, places, buckets in self._here:
            sums = torch.stack(_sums([tensors[index] for index in chosen], p))
            sums = to_device(sums, self._home)
            self.each.index_copy_(0, places, sums)
            if is_maximum(p):
                out.scatter_reduce_(0, buckets, sums, "amax")  # keeps NaN
            else:
                out.index_add_(0, buckets, sums)
        return out


def real_numbers(tensor: Tensor, p: float) -> Tensor:
    """Return real numbers with the same sum of |x|^p; a magnitude may exceed a complex dtype's."""
    if not tensor.is_complex():
        return tensor
    if p == 2:
        return real_view(tensor)
    return tensor.to(torch.complex128).abs()


def _sums(tensors: list[Tensor], p: float) -> list[Tensor]:
    if p == 0:
        # A NaN is no number to be counted: it makes the norm NaN, as for every other p.
        return [torch.where(t.isnan().any(), math.nan, t.count_nonzero().double()) for t in tensors]
    real = [real_numbers(t, p) for t in tensors]
    norms = torch._foreach_norm(real, p, torch.float64)
    return list(norms) if is_maximum(p) or p == 1 else [n.pow(p) for n in norms]


def multiply_(tensors: Sequence[Tensor], coef: Tensor) -> None:
    """Multiply in place by a 0-dim tensor: a Python number would be rounded to a 16-bit dtype.

    Args:
        tensors: All on one device, of any dtype and stride.
        coef: float64, on that device.
    """
    for dtype in dict.fromkeys(t.dtype for t in tensors if t.numel()):
        here = [t for t in tensors if t.dtype == dtype and t.numel()]
        # torch takes all tensors in one launch only where the coefficient has their dtype.
        torch._foreach_mul_(here, coef.to(dtype) if dtype == torch.float32 else coef)
