"""The payload: what travels in the one all-reduce, lane by lane.

All lanes are float64. Their number is fixed when a plan is made, never by a step's data, so that
ranks with other parameters, or without gradients, send the same.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from . import replicas


@dataclass(frozen=True)
class Flags:
    """What each rank says beside its sums; reduced, how many ranks say so.

    Attributes:
        errors: Something is wrong with this rank's tensors or layout.
        present: How many gradients it has.
        strict: It asks for an error where the norm is not finite.
        unread: It does not read the lanes in this step: then no rank may raise in it.
    """

    errors: float = 0.0
    present: float = 0.0
    strict: float = 0.0
    unread: float = 0.0


FLAGS = tuple(field.name for field in fields(Flags))


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
        return slice(self.groups + self.keys, 2 * (self.groups + self.keys))

    @property
    def flags(self) -> slice:
        """What ``Flags`` says."""
        return slice(2 * (self.groups + self.keys), 2 * (self.groups + self.keys) + len(FLAGS))

    @property
    def added(self) -> slice:
        """The caller's numbers."""
        return slice(self.flags.stop, self.flags.stop + self.sums)

    @property
    def copies(self) -> slice:
        """The proof of copies, ``slots`` times ``replicas.LANES``."""
        return slice(self.flags.stop + self.sums, self.size)

    @property
    def size(self) -> int:
        """How many lanes there are."""
        return int(self.flags.stop) + self.sums + self.slots * replicas.LANES

    def empty(self, device: torch.device | None) -> Tensor:
        """Return a payload of a rank that has nothing to give."""
        return torch.zeros(self.size, dtype=torch.float64, device=device)

    def proof(self, payload: Tensor) -> Tensor:
        """View the proof's lanes as ``(slots, replicas.LANES)``."""
        return payload[self.copies].view(self.slots, replicas.LANES)
