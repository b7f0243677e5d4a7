"""The payload: what travels in the one all-reduce, lane by lane.

All lanes are float64. Their number is fixed when a plan is made, never by a step's data, so that
ranks with other parameters, or without gradients, send the same. It is kept small: Gloo's ring cuts
a tensor of n numbers into up to 2n messages, and each costs more than all the numbers.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from . import replicas
from .compat import on_host, to_device

_EXACT = 2**53  # float64 holds every integer up to here


@dataclass(frozen=True)
class Flags:
    """What each rank says beside its sums, yes or no; reduced, how many ranks say so.

    Attributes:
        present: It has gradients.
        strict: It asks for an error where the norm is not finite.
        unread: It does not read the lanes in this step: then no rank may raise in it.
        errors: Something is wrong with its tensors or layout.
    """

    present: int = 0
    strict: int = 0
    unread: int = 0
    errors: int = 0


FLAGS = tuple(field.name for field in fields(Flags))


@dataclass(frozen=True)
class Lanes:
    """Where each number lies.

    Attributes:
        groups: Param groups, each with a power sum of its own.
        keys: Parameters or modules with a power sum of their own.
        slots: Slots for the proof of copies.
        sums: Numbers that the caller adds.
        ranks: How many ranks add up, where flags are to share lanes; 0: each has a lane of its own,
            which a maximum does not mix up either.
    """

    groups: int = 1
    keys: int = 0
    slots: int = 512
    sums: int = 0
    ranks: int = 0

    @cached_property
    def powers(self) -> slice:
        """Power sums: the groups', then the keys'."""
        return slice(0, self.groups + self.keys)

    @cached_property
    def nans(self) -> slice:
        """Flags beside the power sums where a maximum may drop a NaN; else none."""
        start = self.powers.stop
        return slice(start, start if self.ranks else 2 * start)

    @cached_property
    def flags(self) -> slice:
        """What ``Flags`` says: a digit for each, as many to a lane as it holds exactly."""
        return slice(self.nans.stop, self.nans.stop - (-len(FLAGS) // self._digits))

    @cached_property
    def added(self) -> slice:
        """The caller's numbers."""
        return slice(self.flags.stop, self.flags.stop + self.sums)

    @cached_property
    def copies(self) -> slice:
        """The proof of copies, ``slots`` times ``replicas.LANES``."""
        return slice(self.added.stop, self.size)

    @cached_property
    def size(self) -> int:
        """How many lanes there are."""
        return int(self.added.stop) + self.slots * replicas.LANES

    @cached_property
    def _base(self) -> int:
        """A digit counts up to all ranks."""
        return self.ranks + 1 if self.ranks else _EXACT

    @cached_property
    def _digits(self) -> int:
        """How many flags share a lane."""
        digits = 1
        while self.ranks and digits < len(FLAGS) and self._base ** (digits + 1) <= _EXACT:
            digits += 1
        return digits

    def pack(
        self,
        device: torch.device,
        powers: Tensor | None,
        flags: Flags,
        added: Sequence[float | Tensor] = (),
        proof: Tensor | None = None,
    ) -> Tensor:
        """Lay one rank's numbers side by side.

        Args:
            device: Where the payload is to lie.
            powers: What lies in ``powers`` and ``nans``, on that device; None: zeros.
            flags: What this rank says.
            added: The caller's numbers; none: zeros.
            proof: ``(slots, replicas.LANES)``, on that device; None: zeros.
        """
        numbers = [0.0 if isinstance(value, Tensor) else value for value in added]
        numbers += [0.0] * (self.sums - len(numbers))
        told = to_device(on_host([*self.say(flags), *numbers]), device)
        for index, value in enumerate(added, len(told) - self.sums):
            if isinstance(value, Tensor):
                told[index] = value
        lanes = [self._zeros(self.nans.stop, device) if powers is None else powers, told]
        if self.slots:
            room = self.slots * replicas.LANES
            lanes.append(self._zeros(room, device) if proof is None else proof.view(-1))
        return torch.cat(lanes)

    @staticmethod
    def _zeros(count: int, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=device)

    def proof(self, payload: Tensor) -> Tensor:
        """View the proof's lanes as ``(slots, replicas.LANES)``."""
        return payload[self.copies].view(self.slots, replicas.LANES)

    def say(self, flags: Flags) -> list[float]:
        """Write one rank's flags as lanes."""
        said = [int(bool(value)) for value in astuple(flags)]
        lanes = [said[i : i + self._digits] for i in range(0, len(said), self._digits)]
        return [float(sum(v * self._base**k for k, v in enumerate(lane))) for lane in lanes]

    def heard(self, lanes: Sequence[float]) -> Flags:
        """Read the reduced flags' lanes."""
        counts = []
        for lane in map(int, lanes):
            counts += [lane // self._base**k % self._base for k in range(self._digits)]
        return Flags(*counts[: len(FLAGS)])

    def failed(self, payload: Tensor) -> Tensor:
        """Tell on the device whether any rank says ``errors``: the highest digit of its lane."""
        lane, digit = divmod(FLAGS.index("errors"), self._digits)
        above: Tensor = payload[self.flags][lane] >= self._base**digit
        return above
