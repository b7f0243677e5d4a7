"""Multiplies gradients in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .compat import to_device

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
        for device in {t.device for t in tensors}:
            here = [t for t in tensors if t.device == device and t.numel()]
            if here:
                torch._foreach_mul_(here, to_device(coef, device))
        return
    filled = [t for t in tensors if t.numel()]
    if coef == 1 or not filled:
        return
    if 0 < coef < _TINY:
        torch._foreach_mul_(filled, _TINY)
        coef /= _TINY
    # As a tensor: a Python number would be rounded to a 16-bit gradient's dtype first.
    torch._foreach_mul_(filled, torch.tensor(coef, dtype=torch.float64))
