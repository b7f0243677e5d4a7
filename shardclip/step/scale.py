"""Multiplies gradients in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardclip import kernels
from shardclip.compat import on_host, to_device

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
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        here = [tensor for tensor in tensors if tensor.device == device]
        kernels.multiply_(here, to_device(coef, device))
