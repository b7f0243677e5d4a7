"""Local power sums: many tensors in, one float64 sum per bucket out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import blocked, foreach


def power_sums(tensors: Sequence[Tensor], buckets: Sequence[int], count: int, p: float) -> Tensor:
    """Sum |x|^p over the tensors of each bucket (the maximum of |x| for p = inf).

    Args:
        tensors: Real or complex floating-point tensors of any shape, dtype and stride.
        buckets: For each tensor, the bucket its sum goes to.
        count: How many buckets there are.
        p: The norm type.

    Returns:
        float64 of shape ``(count,)`` on the tensors' device, 0 for an empty bucket; NaN where the
        bucket holds one.
    """
    on_cpu = all(t.device.type == "cpu" for t in tensors)
    kernel = blocked.power_sums if on_cpu else foreach.power_sums
    return kernel(tensors, buckets, count, p)


def any_nonfinite(tensor: Tensor) -> Tensor:
    """Whether a NaN or an infinity is in the tensor: a 0-dim bool tensor on its device."""
    return ~torch.isfinite(tensor).all()
