"""Proof that copies are copies: a fingerprint of every replicated tensor, inside the payload.

Each holder of a copy adds c_i * f to lanes of the all-reduce, where f is a weighted sample of its
values (see ``samples``) and the c_i of all holders sum to zero. What comes out is zero if all
copies agree, else the size of their difference, whatever the number of ranks and tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shardclip.compat import on_host, to_device

from . import samples

SKETCH = samples.LANES  # a tensor of up to so many elements is compared as it is
LANES = SKETCH + 2  # lanes of one slot: the sketch, its scale, the number of tensors in it

# Copies disagree when they differ by more than this of their own size and of the total norm:
# noise of non-deterministic kernels and gradients that are nothing but rounding pass.
OF_SAMPLE = 1e-2
OF_TOTAL = 1e-5


@dataclass(frozen=True)
class Copy:
    """One tensor of this rank that other ranks should hold copies of.

    Attributes:
        slot: Which lanes it uses.
        ordinal: Its number among the tensors that the same ranks hold; the weights depend on it.
        holders: The ranks that hold a copy.
        index: Which of them this rank is.
        weight: Its part in the number of tensors: 1 over the ranks that hold any of it.
    """

    slot: int
    ordinal: int
    holders: tuple[int, ...]
    index: int
    weight: float

    @property
    def count(self) -> int:
        """How many copies there are."""
        return len(self.holders)


@lru_cache(maxsize=256)
def coefficients(count: int) -> Tensor:
    """Return ``(count, SKETCH)`` coefficients that sum to zero over the copies.

    Scaled so that the squared sum of coefficient times value is, on average over the lanes, the
    mean squared difference between two copies (exactly that for two copies).
    """
    generator = torch.Generator("cpu").manual_seed(count)
    c = torch.rand(count, SKETCH, generator=generator, dtype=torch.float64, device="cpu") - 0.5
    c -= c.mean(0)
    return c * (2 / c.square().sum(0)).sqrt()


class Proof:
    """What a set of copies needs in every step, worked out once and kept on their device."""

    def __init__(
        self, copies: Sequence[Copy], extents: Sequence[samples.Extent], device: torch.device
    ) -> None:
        """Take the copies and their tensors' extents, in one order."""
        keys = [copy.ordinal * 0x9E3779B1 + copy.holders[0] * 0xC2B2AE35 for copy in copies]
        counts = on_host([copy.count for copy in copies])
        parts = on_host([copy.weight for copy in copies])
        factors = torch.stack([coefficients(copy.count)[copy.index] for copy in copies])
        self._sampler = samples.Sampler(extents, [key & 0xFFFFFFFF for key in keys], device)
        self._factors = to_device(factors, device)
        self._shares = to_device(1 / counts, device)
        self._parts = to_device(parts.unsqueeze(1), device)
        self._slots = on_host([copy.slot for copy in copies], torch.int64)

    def sketches(self, tensors: Sequence[Tensor]) -> Tensor:
        """Fold each tensor's sample into ``(tensors, SKETCH)`` float64 values.

        Scaled so that the sum of squares estimates the whole tensor's.
        """
        return self._sampler.fold(tensors)

    def lanes(self, sketches: Tensor, slots: int, device: torch.device) -> Tensor:
        """Return this rank's part of the proof, ``(slots, LANES)`` float64 on a device."""
        lanes = torch.zeros(slots, LANES, dtype=torch.float64, device=device)
        scale = sketches.square().sum(1) * self._shares
        rows = torch.cat([sketches * self._factors, scale.unsqueeze(1), self._parts], dim=1)
        self._slots = to_device(self._slots, lanes.device)
        return lanes.index_add_(0, self._slots, to_device(rows, lanes.device))


def differences(lanes: Tensor) -> Tensor:
    """Return for each slot the mean squared difference between its copies."""
    return lanes[:, :SKETCH].square().sum(1)


def all_alike(lanes: Tensor, size: float) -> bool:
    """Whether no slot's copies differ by what could matter, seen from the largest difference."""
    return float(differences(lanes).amax()) <= (OF_TOTAL * size) ** 2


def disagreeing(lanes: Tensor, total: Tensor) -> Tensor:
    """Tell which slots hold copies that differ, as bools; a NaN is no difference.

    Args:
        lanes: The reduced ``(slots, LANES)``.
        total: The size of all gradients that differences are compared with; the L2 norm.
    """
    difference = differences(lanes)
    apart = difference > OF_SAMPLE**2 * lanes[:, SKETCH]
    return apart & (difference > (OF_TOTAL * total) ** 2)


def suspicious(lanes: Tensor, total: Tensor) -> Tensor:
    """Like ``disagreeing``, but a slot that several tensors share is suspected sooner.

    There a large tensor could hide a small one; the ranks then look closer.
    """
    difference = differences(lanes)
    shared = lanes[:, SKETCH + 1] > 1.5
    return disagreeing(lanes, total) | (shared & (difference > (OF_TOTAL * total) ** 2))
