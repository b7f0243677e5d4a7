"""Windows: which numbers the digits of an exact sum can hold, and how many may be added up."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BITS = 32  # of a digit

MAX_RANKS = 1 << 20
"""A lane holds at most a digit per rank, 2^52 in all: float64 can still hold that."""

MAX_ELEMENTS = 1 << 63
"""Of all ranks together: their sum stays below every window's top."""


@dataclass(frozen=True)
class Window:
    """Which numbers the digits can hold: multiples of 2^low below 2^top.

    Attributes:
        low: The first digit counts 2^low; even.
        digits: How many there are.
    """

    low: int
    digits: int

    @property
    def lanes(self) -> int:
        """How many int64 a sum takes: the digits, then the two counts."""
        return self.digits + 2

    @property
    def top(self) -> int:
        """Sums must stay below half of 2^top."""
        return self.low + BITS * self.digits


SINGLE = Window(-320, 20)
"""Sums of |x| and x^2 for float32 and smaller dtypes: x^2 lies between 2^-298 and 2^256."""

DOUBLE = Window(-2176, 134)
"""The same for float64, whose x^2 lies between 2^-2148 and 2^2048."""

NUMBER = Window(-1088, 67)
"""Sums of any float64 numbers, one from each rank."""


def window(dtypes: Sequence[torch.dtype]) -> Window:
    """Return the window for sums over elements of these dtypes."""
    wide = any(dtype in (torch.float64, torch.complex128) for dtype in dtypes)
    return DOUBLE if wide else SINGLE


def check_capacity(elements: int, ranks: int) -> None:
    """Make sure that no lane can overflow.

    Args:
        elements: Of all ranks together, or a bound on it.
        ranks: How many add their lanes up.

    Raises:
        ValueError: Too many elements or ranks; the message carries the number and the bound.
    """
    if elements >= MAX_ELEMENTS:
        raise ValueError(
            f"an exact norm holds fewer than 2^63 elements, got {elements}; pass exact=False"
        )
    if ranks > MAX_RANKS:
        raise ValueError(f"an exact norm takes up to 2^20 ranks, got {ranks}; pass exact=False")
