"""Local power sums: many tensors in, one float64 sum per bucket out.

A kernel is built once for a list of tensors (their shapes, dtypes and devices) and called every
step with tensors of the same kind. All kernels have one signature; ``foreach`` specifies it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from . import blocked, foreach


class Kernel(Protocol):
    """A function of tensors and p.

    Attributes:
        each: The last call's sum for each tensor, where the kernel makes them; else None.
    """

    each: Tensor | None

    def __call__(self, tensors: Sequence[Tensor], p: float) -> Tensor:
        """Sum |x|^p bucket by bucket."""


def build(tensors: Sequence[Tensor], buckets: Sequence[int], count: int) -> Kernel:
    """Choose and build the kernel that sums |x|^p over the tensors of each bucket.

    Args:
        tensors: Real or complex floating-point tensors of any shape, dtype and stride.
        buckets: For each tensor, the bucket its sum goes to.
        count: How many buckets there are.

    Returns:
        A function of such tensors and p. It gives float64 of shape ``(count,)`` on the tensors'
        device: the sum of |x|^p (for p = inf the maximum of |x|), 0 for an empty bucket, NaN where
        the bucket holds one.
    """
    on_cpu = all(t.device.type == "cpu" for t in tensors)
    if on_cpu:
        return blocked.PowerSums(tensors, buckets, count)
    return foreach.PowerSums(tensors, buckets, count)


def any_nonfinite(tensor: Tensor) -> Tensor:
    """Whether a NaN or an infinity is in the tensor: a 0-dim bool tensor on its device."""
    return ~torch.isfinite(tensor).all()
