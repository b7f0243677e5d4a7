"""Floating-point formats: the bits of their numbers, for kernels that read them as integers."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kind:
    """A floating-point dtype: the integer dtype of its bits, its fraction's bits, its smallest bit.

    ``least`` is 2^least, the dtype's smallest subnormal.
    """

    bits: torch.dtype
    fraction: int
    least: int

    @property
    def sign(self) -> int:
        """The bits of the sign alone, as an integer."""
        return torch.iinfo(self.bits).min

    @property
    def infinity(self) -> int:
        """The bits of infinity, as an integer."""
        return (-self.sign >> self.fraction) - 1 << self.fraction


KINDS = {
    torch.float64: Kind(torch.int64, 52, -1074),
    torch.float32: Kind(torch.int32, 23, -149),
    torch.bfloat16: Kind(torch.int16, 7, -133),
    torch.float16: Kind(torch.int16, 10, -24),
}


@lru_cache(maxsize=4)
def significands(fraction: int, p: int) -> Tensor:
    """Return |x|^p for each code of 16 bits, in units of its exponent field's smallest bit."""
    field_of = torch.arange(1 << 15, dtype=torch.int64, device="cpu").view(-1, 1 << fraction)
    hidden = (field_of >> fraction).clamp(max=1) << fraction
    return ((field_of & ((1 << fraction) - 1)) + hidden) ** p
