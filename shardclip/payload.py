"""The payload: what travels in the one all-reduce, lane by lane.

All lanes are float64. Their number is fixed when a plan is made, never by a step's data, so that
ranks with other parameters, or without gradients, send the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import replicas


@dataclass(frozen=True)
class Lanes:
    """Where each number lies.

    Attributes:
        groups: Param groups, each with a power sum of its own.
        keys: Parameters or modules with a power sum of their own.
        slots: Slots for the proof of copies.
        sums: Numbers that the caller adds.
    """

    groups: int = 1
    keys: int = 0
    slots: int = 512
    sums: int = 0

    @property
    def powers(self) -> slice:
        """Power sums: the groups', then the keys'."""
        return slice(0, self.groups + self.keys)

    @property
    def nans(self) -> slice:
        """Flags beside the power sums: a maximum may drop a NaN."""
        return slice(self.groups + self.keys, self.errors)

    @property
    def errors(self) -> int:
        """How many ranks found something wrong."""
        return 2 * (self.groups + self.keys)

    @property
    def present(self) -> int:
        """How many gradients there are, over all ranks."""
        return self.errors + 1

    @property
    def strict(self) -> int:
        """How many ranks ask for an error where the norm is not finite."""
        return self.errors + 2

    @property
    def unread(self) -> int:
        """How many ranks do not read the lanes in this step: then none may raise in it."""
        return self.errors + 3

    @property
    def added(self) -> slice:
        """The caller's numbers."""
        return slice(self.errors + 4, self.errors + 4 + self.sums)

    @property
    def copies(self) -> slice:
        """The proof of copies, ``slots`` times ``replicas.LANES``."""
        return slice(self.errors + 4 + self.sums, self.size)

    @property
    def size(self) -> int:
        """How many lanes there are."""
        return self.errors + 4 + self.sums + self.slots * replicas.LANES

    def empty(self, device: torch.device | None) -> Tensor:
        """Return a payload of a rank that has nothing to give."""
        return torch.zeros(self.size, dtype=torch.float64, device=device)

    def proof(self, payload: Tensor) -> Tensor:
        """View the proof's lanes as ``(slots, replicas.LANES)``."""
        return payload[self.copies].view(self.slots, replicas.LANES)
