"""Multiplies gradients in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .compat import on_host, to_device

# Below this a coefficient is no normal float32 any more, and is applied in two steps.
_TINY = 2.0**-100


@torch.no_grad()
def scale_(tensors: Sequence[Tensor], coef: float | Tensor) -> None:
    """Multiply local tensors by a coefficient, each in its own dtype.

    Args:
        tensors: Of any dtype, device and stride.
        coef: A number, known on the host: 1 costs nothing; or a 0-dim float64 tensor, which is
            multiplied by without a host sync.
    """
    if isinstance(coef, Tensor):
        _multiply(tensors, coef)
        return
    if coef == 1:
        return
    if 0 < coef < _TINY:
        _multiply(tensors, on_host(_TINY))
        coef /= _TINY
    _multiply(tensors, on_host(coef))


def _multiply(tensors: Sequence[Tensor], coef: Tensor) -> None:
    """Multiply by a 0-dim tensor: a Python number would be rounded to a 16-bit gradient's dtype."""
    for device, dtype in dict.fromkeys((t.device, t.dtype) for t in tensors if t.numel()):
        here = [t for t in tensors if t.device == device and t.dtype == dtype and t.numel()]
        # torch takes all tensors in one launch only where the coefficient has their dtype.
        own = coef.to(dtype) if dtype == torch.float32 else coef
        torch._foreach_mul_(here, to_device(own, device))
