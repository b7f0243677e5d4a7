"""Local power sums: many tensors in, one float64 sum per bucket out; and products in place.

A kernel is built once for a list of tensors (their shapes, dtypes and devices) and called every
step with tensors of the same kind. All kernels have one signature; ``foreach`` specifies it.
"""

import functools
import importlib.util
import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardclip.math import Window

from . import blocked, exact, foreach


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
    devices = {tensor.device for tensor in tensors}
    if all(device.type == "cpu" for device in devices):
        return blocked.PowerSums(tensors, buckets, count)
    if len(devices) == 1 and available(*devices):
        from . import fused

        return fused.PowerSums(tensors, buckets, count)
    return foreach.PowerSums(tensors, buckets, count)


def build_alike(tensors: Sequence[Tensor], buckets: Sequence[int], count: int) -> Kernel:
    """Build a kernel as ``build`` does, whose bits do not depend on where the tensors lie."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return blocked.AlikeSums(tensors, buckets, count)
    return build(tensors, buckets, count)


def build_exact(
    tensors: Sequence[Tensor], buckets: Sequence[int], count: int, window: Window
) -> Kernel:
    """Choose and build the kernel that sums exactly: int64 ``(count, window.lanes)``.

    Args:
        tensors: As in ``build``.
        buckets: As in ``build``.
        count: As in ``build``.
        window: Which digits to write.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) == 1 and available(*devices):
        from . import exact_triton

        return exact_triton.ExactSums(tensors, buckets, count, window)
    return exact.ExactSums(tensors, buckets, count, window)


def multiply_(tensors: Sequence[Tensor], coef: Tensor) -> None:
    """Multiply in place, with no host sync.

    Args:
        tensors: Of any dtype and stride, all on one device.
        coef: float64, 0-dim, on that device.
    """
    if available(coef.device):
        from . import fused

        fused.multiply_(tensors, coef)
    else:
        foreach.multiply_(tensors, coef)


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the Triton kernels work on this device: tried once, on one number, without a sync."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    try:
        from . import fused

        one = torch.ones(1, device=device)
        if not fused.INTERPRETED:  # an interpreter on the host cannot read device memory
            fused.PowerSums([one], [0], 1)([one], 2.0)
    except Exception as error:  # no compiler, too old a device, ...: Triton has an error for each
        # Not a warning: where those are errors, this rank would miss the all-reduce.
        logging.getLogger(__name__).warning(
            "Triton is installed but does not work on %s, so gradients are summed and scaled by "
            "torch's foreach calls, which are slower (%s: %s)",
            device,
            type(error).__name__,
            error,
        )
        return False
    return not fused.INTERPRETED


def any_nonfinite(tensor: Tensor) -> Tensor:
    """Whether a NaN or an infinity is in the tensor: a 0-dim bool tensor on its device."""
    return ~torch.isfinite(tensor).all()
