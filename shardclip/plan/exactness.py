"""What a plan needs to sum exactly: which dtypes it accepts, and its kernel."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardclip import kernels
from shardclip.comm import World
from shardclip.kernels import exact
from shardclip.math import SINGLE, Window, check_capacity


def check(p: float, world: World) -> None:
    """Refuse norm types and numbers of ranks that cannot be exact, before any communication.

    Raises:
        ValueError: ``exact=True`` takes p = 1 and 2, and a bounded number of ranks.
    """
    exact.check(torch.float32, p)
    check_capacity(0, world.size)


def accept(p: float, window: Window | None) -> Callable[[torch.dtype], None] | None:
    """Return what refuses dtypes that this window cannot hold; None where nothing is exact."""
    if window is None:
        return None

    def check_dtype(dtype: torch.dtype) -> None:
        exact.check(dtype, p)
        if window is SINGLE and dtype in (torch.float64, torch.complex128):
            raise ValueError(
                f"exact=True was set up for parameters of at most 32 bits, and this gradient is "
                f"{dtype}; cast it, or give float64 parameters"
            )

    return check_dtype


def builder(
    window: Window,
) -> Callable[[Sequence[Tensor], Sequence[int], int], kernels.Kernel]:
    """Return what builds a kernel with these digits."""
    return lambda tensors, buckets, count: kernels.build_exact(tensors, buckets, count, window)
