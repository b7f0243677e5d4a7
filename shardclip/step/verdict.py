"""What is wrong with a step, decided after the reduction, on all ranks alike.

Everything here that communicates does so only when the reduced lanes have told every rank that
something is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardclip import kernels
from shardclip.comm import World, reduce
from shardclip.compat import HostCopy, on_host
from shardclip.copies import bits, proof
from shardclip.errors import NonFiniteGradientError, ReplicaMismatchError
from shardclip.math import is_maximum

from . import inspection
from .inspection import few, listed
from .measure import Measured

_MEND = (
    "Clipping would scale them differently on each rank. If they are shards, or belong to "
    "different experts or pipeline stages, say so with layout=(mesh, placements). If they should "
    "be copies, average them before clipping: torch.distributed.all_reduce(p.grad, "
    "op=torch.distributed.ReduceOp.AVG); parameters that fully_shard was told to ignore, or that "
    "were added after it, are not averaged by FSDP2"
)


@dataclass(frozen=True, eq=False)
class _Held:
    """One rank's copy of a suspected tensor."""

    rank: int
    name: str
    copy: proof.Copy
    sketch: torch.Tensor


def raise_problems(measured: Measured, world: World) -> None:
    """Raise on every rank what is wrong with any rank's tensors or layout.

    Raises:
        ValueError: With what is wrong, the parameter and the rank (a TypeError for types).
    """
    raise_told(reduce.gather((world.rank, measured.plan.problems), world))


def raise_told(told: list[tuple[int, list[tuple[str, str]]]]) -> None:
    """Raise what any rank told to be wrong; nothing if none did.

    Raises:
        TypeError: All that is wrong is a type.
        ValueError: Anything else.
    """
    kinds = {kind for _, problems in told for kind, _ in problems}
    lines = [f"{text} (rank {rank})" for rank, problems in told for _, text in problems]
    if lines:
        raise (TypeError if kinds == {"TypeError"} else ValueError)(few(lines))


def raise_settings(measured: Measured, world: World) -> None:
    """Raise on every rank what this step's settings are where, if any two ranks' differ.

    Raises:
        ValueError: Names the setting, its values and the ranks.
    """
    told = reduce.gather(measured.settings, world)
    raise_unlike([(said, [rank]) for said, rank in zip(told, world.ranks, strict=True)])


def raise_unlike(told: Sequence[tuple[Mapping[str, object], Sequence[int]]]) -> None:
    """Raise if any two ranks' settings differ.

    Args:
        told: Settings by name, and the ranks that have them.

    Raises:
        ValueError: Names the setting, its values and the ranks.
    """
    for name in told[0][0]:
        values: dict[str, list[int]] = defaultdict(list)
        for said, ranks in told:
            values[repr(said.get(name))].extend(ranks)
        if len(values) > 1:
            shown = "; ".join(f"{value} on rank {listed(r)}" for value, r in values.items())
            raise ValueError(f"{name}= differs between ranks: {shown}. Give all ranks the same")


def raise_nonfinite(measured: Measured, world: World) -> None:
    """Raise on every rank, naming parameters and ranks. The norm is known not to be finite.

    Raises:
        NonFiniteGradientError: Always.
    """
    lines = [str(found) for found in inspection.nonfinite(measured, world)]
    what = few(lines) if lines else "the sum of the gradients' powers overflows float64"
    raise NonFiniteGradientError(
        f"the total norm is non-finite ({float(measured.total_norm)}): NaN or infinity in {what}. "
        "No gradient was changed"
    )


def nonfinite_names(measured: Measured) -> list[str]:
    """Name this rank's parameters with a NaN or an infinity.

    Reads the gradients once more; where they are gone, the sums that the kernel has kept.
    """
    flags = [bool(kernels.any_nonfinite(whole)) for whole in measured.wholes]
    seats = measured.plan.seats
    if not flags:
        flags, seats = measured.kept(), measured.plan.read()
    pairs = zip(seats, flags, strict=bool(flags))
    return list(dict.fromkeys(seat.source.name for seat, bad in pairs if bad))


def raise_drift(measured: Measured, world: World, warn: bool) -> None:
    """Raise, or note for a warning, on every rank if copies differ in any bit.

    Raises:
        ReplicaMismatchError: Names the parameters, the ranks, and how far apart they are.
    """
    lanes = measured.plan.lanes
    if not lanes.drift or not bits.found(measured.payload[lanes.bits]):
        return
    text = f"copies are not the same bit for bit: {few(inspection.drifted(measured, world))}"
    if not warn:
        raise ReplicaMismatchError(f"{text}. No gradient was changed")
    measured.notes.append(text)  # a warning may be an error: not before the step is through


def raise_mismatch(measured: Measured, world: World) -> None:
    """Raise on every rank if copies are none.

    Raises:
        ReplicaMismatchError: Names the parameters, the ranks and the mend.
    """
    if not measured.plan.lanes.slots:
        return
    size = measured.size()
    if proof.all_alike(measured.proof, float(size)):
        return
    suspects = proof.suspicious(measured.proof, size).nonzero().flatten().tolist()
    if not suspects:
        return
    told = reduce.gather(_statement(measured, set(suspects), world.rank), world)
    lines = _differences([entry for entries in told for entry in entries], float(size))
    if lines:
        raise ReplicaMismatchError(
            f"gradients that should be copies are none: {few(lines)}. {_MEND}"
        )


def _statement(measured: Measured, suspects: set[int], rank: int) -> list[_Held]:
    """Say what this rank holds in the suspected slots."""
    if measured.sketches is None:
        return []
    seats = [seat for seat in measured.plan.seats if seat.copy is not None]
    return [
        _Held(rank, seat.source.name, seat.copy, sketch)
        for seat, sketch in zip(seats, measured.sketches.cpu(), strict=True)
        if seat.copy is not None and seat.copy.slot in suspects
    ]


def _differences(entries: list[_Held], size: float) -> list[str]:
    """Repeat the proof tensor by tensor, and describe those that fail it."""
    tensors: dict[tuple[int, int], list[_Held]] = defaultdict(list)
    for entry in entries:
        tensors[entry.copy.slot, entry.copy.ordinal].append(entry)
    lines = []
    for held in tensors.values():
        copies = [replace(entry.copy, slot=0) for entry in held]
        here = torch.device("cpu")
        again = proof.Proof(copies, [(0, 1)] * len(copies), here)
        rows = again.lanes(torch.stack([entry.sketch for entry in held]), 1, here)
        if bool(proof.disagreeing(rows, on_host(size))):
            lines.append(_describe(held, rows[0]))
    return lines


def _describe(held: list[_Held], row: torch.Tensor) -> str:
    ranks = [entry.rank for entry in held]
    if len({entry.name for entry in held}) > 1:  # pipeline stages or experts in the same place
        name = " / ".join(f"{entry.name} (rank {entry.rank})" for entry in held[:4])
    else:
        name = held[0].name
    missing = {rank for entry in held for rank in entry.copy.holders} - set(ranks)
    if missing:
        return f"{name}: on rank {listed(ranks)}, but not on rank {listed(missing)}"
    difference = float(row[: proof.SKETCH].square().sum().sqrt())
    scale = float(row[proof.SKETCH].sqrt())
    odd = sorted({rank for entry in held for rank in _odd_ones(entry, held)})
    who = f"rank {listed(odd)} differs from the others"
    who = who if odd else f"ranks {listed(ranks)} differ"
    return f"{name}: {who} by {difference / scale:.2g} of its size"


def _odd_ones(entry: _Held, held: list[_Held]) -> list[int]:
    """Return this rank where most holders of the same piece agree, but not with it."""
    peers = [other for other in held if other.copy.holders == entry.copy.holders]
    tolerance = proof.OF_SAMPLE * entry.sketch.norm()
    alike = [
        sum(bool((one.sketch - other.sketch).norm() <= tolerance) for other in peers)
        for one in peers
    ]
    most = max(alike)
    if most * 2 <= len(peers) or alike[peers.index(entry)] * 2 > len(peers):
        return []
    return [entry.rank]


def pass_verdict(measured: Measured, world: World, warns: bool = False) -> Deferred | None:
    """Raise what is wrong on every rank, or leave it to the next call, likewise on every rank.

    Args:
        measured: The step.
        world: Who took part.
        warns: Copies that differ in some bit, but not much, are only warned of.

    Returns:
        What the next call has to settle: some rank does not read its lanes in this step. None if
        all is well and every rank knows it.

    Raises:
        ValueError, TypeError, NonFiniteGradientError, ReplicaMismatchError: On all ranks or none.
    """
    if not measured.read:
        return Deferred(measured, world)
    flags = measured.flags
    if flags.unread:
        return Deferred(measured, world)
    if flags.errors:
        raise_problems(measured, world)
    if flags.differ:
        raise_settings(measured, world)
    if not measured.finite:
        if flags.strict:
            raise_nonfinite(measured, world)
    elif not is_maximum(measured.p):
        raise_drift(measured, world, warns)
        raise_mismatch(measured, world)
    return None


class Deferred:
    """A verdict that is passed on the device now and read in the next call, without a host sync.

    Until then a step that failed leaves the gradients as they are and its norm is NaN.
    """

    def __init__(self, measured: Measured, world: World) -> None:
        failed = measured.plan.lanes.failed(measured.payload)
        if not is_maximum(measured.p):
            differ = proof.disagreeing(measured.proof, measured.size()).any()
            failed = failed | (differ & torch.isfinite(measured.total_norm))
        self.failed = failed
        self._world = world
        self.measured = replace(measured)
        self.measured.forget_gradients()
        self._told = HostCopy(failed)

    def without_parameters(self) -> Deferred:
        """Forget the parameters but for their names, for a verdict that nobody else keeps."""
        self.measured.plan = replace(self.measured.plan.without_parameters(), _tables=None)
        return self

    def settle(self, present: World) -> None:
        """Wait for the verdict and raise it, on all ranks alike.

        Args:
            present: Who takes part in this call; where some are missing, details are not asked for.

        Raises:
            ValueError, TypeError, ReplicaMismatchError: As ``pass_verdict``.
        """
        if not bool(self._told.read()):
            return
        wrong = self.measured.flags.errors or self.measured.flags.differ
        if present.size < self._world.size:
            raise (ValueError if wrong else ReplicaMismatchError)(
                "the last step before join() failed, and its gradients were left as they were: "
                + ("a rank's tensors or settings are wrong" if wrong else "copies differ")
                + ". Inside join() the ranks cannot tell each other where; run that step without it"
            )
        if self.measured.flags.errors:
            raise_problems(self.measured, self._world)
        if self.measured.flags.differ:
            raise_settings(self.measured, self._world)
        raise_mismatch(self.measured, self._world)
