"""The payload: what travels in the one all-reduce, lane by lane.

All lanes are float64, or int64 where power sums are exact. Their number is fixed when a plan is
made, never by a step's data, so that ranks with other parameters, or without gradients, send the
same. It is kept small: Gloo's ring cuts a tensor of n numbers into up to 2n messages, and each
costs more than all the numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from shardclip import copies
from shardclip.compat import constant, on_host, to_device
from shardclip.math import ALONE, Digits, exact, fingerprints, windows

from .world import World


@dataclass(frozen=True)
class Flags:
    """What each rank says beside its sums, 1 or 0; reduced, how many ranks say so.

    Attributes:
        present: It has gradients.
        strict: It asks for an error where the norm is not finite.
        unread: It does not read the lanes in this step: then no rank may raise in it.
        errors: Something is wrong with its tensors or layout.
        settings: What shows whether all ranks have the same settings: see ``Lanes.settings``.
        against: The same, where the lanes may combine by maximum.
    """

    present: int = 0
    strict: int = 0
    unread: int = 0
    errors: int = 0
    settings: int = 0
    against: int = 0

    @property
    def differ(self) -> bool:
        """Whether the ranks' settings differ; of the reduced flags."""
        return (self.settings + self.against) % fingerprints.SETTINGS != 0


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
        checks: The ranks' settings are compared.
        drift: Copies may be compared bit for bit.
        window: The digits of exact power sums; None: they are float64.
    """

    groups: int = 1
    keys: int = 0
    slots: int = 512
    sums: int = 0
    ranks: int = 0
    checks: bool = False
    drift: bool = False
    window: windows.Window | None = None

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
        """What ``Flags`` says, as many to a lane as it holds exactly."""
        return slice(self.nans.stop, self.nans.stop + self._digits.lanes)

    @cached_property
    def added(self) -> slice:
        """The caller's numbers."""
        return slice(self.flags.stop, self.flags.stop + self.sums)

    @cached_property
    def bits(self) -> slice:
        """What compares copies bit for bit."""
        return slice(self.added.stop, self.added.stop + self.drift * copies.bits.LANES)

    @cached_property
    def copies(self) -> slice:
        """The proof of copies, ``slots`` times ``copies.proof.LANES``."""
        return slice(self.bits.stop, self.size)

    @cached_property
    def size(self) -> int:
        """How many lanes there are."""
        return int(self.bits.stop) + self.slots * copies.proof.LANES

    @cached_property
    def _proofs(self) -> windows.Window:
        """The window of the proof's lanes where they are integers."""
        return windows.SINGLE if self.window is windows.SINGLE else windows.NUMBER

    @cached_property
    def _digits(self) -> Digits:
        """How the flags share lanes; a maximum would mix them up."""
        if not self.ranks:
            return Digits([ALONE] * 4 + [ALONE if self.checks else 1] * 2)
        most = self.ranks * (fingerprints.SETTINGS - 1) + 1 if self.checks else 1
        yes = self.ranks + 1
        return Digits([yes, yes, yes, yes, most, 1])

    def pack(
        self,
        device: torch.device,
        powers: Tensor | None,
        flags: Flags,
        added: Sequence[float | Tensor] = (),
        proof: Tensor | None = None,
        bits: Tensor | None = None,
    ) -> Tensor:
        """Lay one rank's numbers side by side.

        Args:
            device: Where the payload is to lie.
            powers: What lies in ``powers`` and ``nans``, on that device; None: zeros.
            flags: What this rank says.
            added: The caller's numbers; none: zeros.
            proof: ``(slots, copies.proof.LANES)``, on that device; None: zeros.
            bits: ``(copies.bits.LANES,)``, on that device; None: zeros.
        """
        on_device = [isinstance(v, Tensor) and v.device.type != "cpu" for v in added]
        numbers = [0.0 if d else float(v) for v, d in zip(added, on_device, strict=True)]
        numbers += [0.0] * (self.sums - len(numbers))
        lanes = [self._zeros(self.nans.stop, device) if powers is None else powers]
        lanes.append(constant(tuple(self.say(flags)), torch.float64, device))
        if self.sums:
            told = to_device(on_host(numbers), device)
            for index, value in enumerate(added):
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    told[index] = value
            lanes.append(told)
        if self.drift:
            lanes.append(self._zeros(copies.bits.LANES, device) if bits is None else bits)
        if self.slots:
            room = self.slots * copies.proof.LANES
            lanes.append(self._zeros(room, device) if proof is None else proof.view(-1))
        return torch.cat(lanes)

    def send(self, payload: Tensor, sums: Tensor | None) -> Tensor:
        """Turn the numbers into what the all-reduce adds up: with exact sums into int64.

        Args:
            payload: float64; its powers and ``nans`` are not looked at where sums are exact.
            sums: int64 ``(groups + keys, window.lanes)``; None: zeros.
        """
        if self.window is None:
            return payload
        if sums is None:
            sums = payload.new_zeros(self.powers.stop, self.window.lanes, dtype=torch.int64)
        added = exact.encode(payload[self.added])
        proof = exact.encode(payload[self.copies], self._proofs)
        whole = (payload[self.flags].long(), payload[self.bits].long())
        return torch.cat([sums.view(-1), whole[0], added.view(-1), whole[1], proof.view(-1)])

    def receive(self, sent: Tensor) -> tuple[Tensor, Tensor | None]:
        """Turn what was added up back into float64 numbers, and exact sums where they are."""
        if self.window is None:
            return sent, None
        widths = [
            self.powers.stop * self.window.lanes,
            self.flags.stop - self.flags.start,
            self.sums * windows.NUMBER.lanes,
            self.bits.stop - self.bits.start,
            self.slots * copies.proof.LANES * self._proofs.lanes,
        ]
        sums, flags, added, bits, proof = torch.split(sent, widths)
        sums = sums.view(-1, self.window.lanes)
        numbers = exact.decode(added.view(-1, windows.NUMBER.lanes))
        samples = exact.decode(proof.view(-1, self._proofs.lanes), self._proofs)
        powers = exact.decode(sums, self.window)
        powers = torch.nn.functional.pad(powers, (0, self.nans.stop - self.nans.start))
        return torch.cat([powers, flags.double(), numbers, bits.double(), samples]), sums

    @staticmethod
    def _zeros(count: int, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=device)

    def proof(self, payload: Tensor) -> Tensor:
        """View the proof's lanes as ``(slots, copies.proof.LANES)``."""
        return payload[self.copies].view(self.slots, copies.proof.LANES)

    def say(self, flags: Flags) -> list[float]:
        """Write one rank's flags as lanes."""
        return self._digits.write([int(getattr(flags, name)) for name in FLAGS])

    def heard(self, payload: Tensor) -> Flags:
        """Read the reduced flags."""
        return Flags(*self._digits.read(payload[self.flags].tolist()))

    def settings(self, value: int, world: World, maximum: bool) -> dict[str, int]:
        """Return the flags by which ranks see whether they all have this number.

        Where some combine by maximum and others by sum they see that, too, whichever it becomes.
        """
        prime = fingerprints.SETTINGS
        if maximum:
            return {"settings": value % prime, "against": prime - value % prime}
        index = world.ranks.index(world.rank)
        share = fingerprints.share(value, index, world.size, prime)
        return {"settings": share} if self.ranks else {"settings": share, "against": prime}

    def failed(self, payload: Tensor) -> Tensor:
        """Tell on the device whether any rank says ``errors``, or their settings differ."""
        lanes = payload[self.flags]
        errors, settings, against = (
            self._digits.sum_of(lanes, FLAGS.index(name))
            for name in ("errors", "settings", "against")
        )
        return (errors > 0) | ((settings + against) % fingerprints.SETTINGS != 0)
