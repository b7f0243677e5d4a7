"""One step's measurement: local sums, one all-reduce, and what every rank may conclude from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardclip import compat
from shardclip.comm import Flags, World, reduce
from shardclip.copies import SKETCH, samples
from shardclip.errors import problem
from shardclip.layout import adapters
from shardclip.math import exact, fingerprints, norm
from shardclip.plan import Plan, locals_of, readings


@dataclass
class Measured:
    """What came out, the same bits on every rank.

    Attributes:
        payload: The reduced lanes.
        norms: The groups', then the keys'; with NaN restored for p = inf.
        group_norms: float64, one for each param group.
        total_norm: float64, 0-dim.
        plan: What was read.
        p: The norm type.
        local: This rank's local gradients, seat by seat, as they are stored.
        wholes: Their values: of a sparse gradient, duplicates added up.
        sketches: Of those with copies elsewhere, in the seats' order.
        read: Whether this rank reads the lanes in this step.
        each: The kernel's sum for each tensor, where it makes one.
        home: The device that the payload travelled on.
        unit: What the gradients are still to be multiplied by, where they are.
        settings: What all ranks should have alike in this step.
        grads: The gradients that the plan's positions count.
        notes: What to warn of when the step is through.
        nonfinite: What is not finite on any rank, where that was gathered.
        notices: What to warn of once, and about what, when the step is through.
    """

    payload: Tensor
    norms: Tensor
    group_norms: Tensor
    total_norm: Tensor
    plan: Plan
    p: float
    local: list[Tensor]
    wholes: list[Tensor]
    sketches: Tensor | None
    read: bool = True
    each: Tensor | None = None
    home: torch.device = field(default_factory=lambda: torch.device("cpu"))
    unit: Tensor | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    grads: Sequence[Tensor | None] = ()
    notes: list[str] = field(default_factory=list)
    nonfinite: tuple[Any, ...] = ()
    notices: list[tuple[object, str]] = field(default_factory=list)

    def targets(self, group: int, apart: frozenset[int] = frozenset()) -> list[Tensor]:
        """List what is scaled in place for a param group, but for parameters set apart by `id`.

        What was read last comes first: it is still in the cache.
        """
        pairs = zip(reversed(self.plan.seats), reversed(self.local), strict=True)
        return [
            adapters.storage(tensor)
            for seat, tensor in pairs
            if seat.source.group == group and id(seat.source.parameter) not in apart
        ]

    def kind(self) -> tuple[torch.device, torch.dtype]:
        """Return the device and dtype that results take on this rank."""
        wide = self.plan.wide or self.plan.lanes.window is not None
        device = self.local[0].device if self.local else self.home
        return device, torch.float64 if wide else torch.float32

    @property
    def proof(self) -> Tensor:
        """The reduced lanes of the proof, one row a slot."""
        return self.plan.lanes.proof(self.payload)

    def size(self) -> Tensor:
        """The L2 size of all gradients as they are: what differences of copies are compared with.

        For other p it is estimated from the copies' samples alone.
        """
        if self.p == 2:
            return self.total_norm if self.unit is None else self.total_norm / self.unit
        return self.proof[:, SKETCH].sum().sqrt()

    @cached_property
    def finite(self) -> bool:
        """Whether the total norm is finite; a host sync where it is not on CPU."""
        return math.isfinite(float(self.total_norm))

    @cached_property
    def flags(self) -> Flags:
        """Read the ranks' flags; a host sync where the payload is not on CPU."""
        lanes = self.plan.lanes
        return lanes.heard(self.payload)

    def kept(self) -> list[bool]:
        """Tell for all that was read, from the kernel's sums of this step, what was not finite."""
        if self.each is None:
            return []
        return (~torch.isfinite(self.each)).tolist()

    def forget_gradients(self) -> None:
        """Let go of the gradients, which must not outlive their step."""
        self.local, self.wholes, self.grads = [], [], []


@dataclass
class Started:
    """A measurement whose all-reduce is under way."""

    plan: Plan
    payload: Tensor
    work: reduce.Work
    p: float
    local: list[Tensor]
    wholes: list[Tensor]
    sketches: Tensor | None
    read: bool
    settings: Mapping[str, object]
    grads: Sequence[Tensor | None]

    @torch.no_grad()
    def finish(self, unit: Tensor | None = None) -> Measured:
        """Wait for the other ranks' numbers and conclude.

        Args:
            unit: What the gradients are still to be multiplied by (a loss scale's inverse): the
                norms are those of the products.
        """
        self.work.wait()
        home = self.payload.device
        sent = self.payload.cpu() if self.read else self.payload  # the sync of a step that reads
        payload, sums = self.plan.lanes.receive(sent)
        found = conclude(
            self.plan, payload, self.p, self.local, self.wholes, self.sketches, unit, sums
        )
        found.read, found.each, found.home = self.read, self.plan.each(), home
        found.settings, found.grads = self.settings, self.grads
        return found


def measure(
    plan: Plan, grads: Sequence[Tensor | None], p: float, world: World, **how: Any
) -> Measured:
    """Start a measurement and finish it."""
    return start(plan, grads, p, world, **how).finish()


@torch.no_grad()
def start(
    plan: Plan,
    grads: Sequence[Tensor | None],
    p: float,
    world: World,
    *,
    strict: bool = False,
    reads: bool = False,
    added: Sequence[float | Tensor] = (),
    settings: Mapping[str, object] | None = None,
    compare: bool = False,
) -> Started:
    """Sum what this rank owns and start to combine it with the other ranks': one all-reduce.

    Args:
        plan: Made for these gradients.
        grads: Those that the plan was made for.
        p: The norm type.
        world: Who takes part.
        strict: Ask for an error where the norm is not finite.
        reads: This rank will read the lanes in this step, even if that costs a host sync.
        added: Numbers to be summed over the ranks.
        settings: What all ranks should have alike, by name; compared where the lanes do so.
        compare: Compare copies bit for bit, where the lanes have room for it.
    """
    settings = settings or {}
    number = fingerprints.of(*settings.items())
    checked = plan.lanes.settings(number, world, norm.is_maximum(p)) if plan.lanes.checks else {}
    here = next((compat.local_tensor(g).device for g in grads if g is not None), None)
    device = world.device or here or torch.device("cpu")
    reads = reads or reads_are_free(device)
    local: list[Tensor] = []
    wholes: list[Tensor] = []
    sketches = None
    flags = Flags(bool(plan.seats), strict, not reads, bool(plan.problems), **checked)
    try:
        local = locals_of(plan, grads)
        parts, wholes = readings(plan, local)
        payload, sketches = fill(plan, parts, wholes, local, p, device, flags, added, compare)
    except Exception as error:  # out of memory, say: this rank must still join the all-reduce
        problems = [*plan.problems, problem("this rank's gradients", error)]
        plan = replace(plan, problems=problems, seats=[], _tables=None)  # nothing is held here
        flags, local, wholes = replace(flags, errors=1), [], []
        payload, _ = fill(plan, [], [], [], p, device, flags)
    work = reduce.all_reduce(payload, world, maximum=norm.is_maximum(p))
    return Started(plan, payload, work, p, local, wholes, sketches, reads, settings, grads)


def reads_are_free(device: torch.device) -> bool:
    """Whether reading a payload on this device costs no host sync."""
    return device.type == "cpu"


def fill(
    plan: Plan,
    parts: list[Tensor],
    wholes: list[Tensor],
    local: list[Tensor],
    p: float,
    device: torch.device,
    flags: Flags,
    added: Sequence[float | Tensor] = (),
    compare: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Pack this rank's part of the payload; return it, and the fingerprints of its copies."""
    lanes = plan.lanes
    powers = proof = sketches = bits = exact_sums = None
    if plan.seats and not plan.problems:
        tables = plan.tables(parts, wholes, device)
        sums = compat.to_device(tables.kernel(parts, p), device)
        powers = tables.powers(sums, norm.is_maximum(p), lanes)
        if lanes.window is not None:
            powers, exact_sums = None, powers
        if tables.proof is not None:
            held = plan.copied(wholes)
            pairs = zip(plan.copied(local), held, strict=True)
            there = held if plan.dense else [samples.placed(*pair) for pair in pairs]
            sketches = tables.proof.sketches(there)
            proof = tables.proof.lanes(sketches, lanes.slots, device)
            if compare and tables.drift is not None:
                hashes = tables.drift.hashes(held, plan.copied(local))
                bits = compat.to_device(tables.drift.lanes(hashes), device)
    packed = lanes.pack(device, powers, flags, added, proof, bits)
    return lanes.send(packed, exact_sums), sketches


def conclude(
    plan: Plan,
    payload: Tensor,
    p: float,
    local: list[Tensor],
    wholes: list[Tensor],
    sketches: Tensor | None,
    unit: Tensor | None = None,
    sums: Tensor | None = None,
) -> Measured:
    """Turn the reduced payload into norms; every rank does this alike, in float64."""
    lanes = plan.lanes
    powers = payload[lanes.powers]
    if norm.is_maximum(p):
        powers = torch.where(payload[lanes.nans] > 0, torch.nan, powers)
    if sums is not None and lanes.window is not None:
        norms = exact.finish(sums, p, lanes.window)
        total_norm = exact.finish(sums[: lanes.groups].sum(0), p, lanes.window)
    else:
        norms = norm.finish(powers, p)
        total_norm = norms[0]
        if lanes.groups > 1:
            held = powers[: lanes.groups]
            whole = held.amax() if norm.is_maximum(p) else held.sum()
            total_norm = norm.finish(whole, p)
    if unit is not None and p != 0:
        unit = compat.to_device(unit, norms.device)
        norms, total_norm = norms * unit, total_norm * unit
    group_norms = norms[: lanes.groups] if lanes.keys else norms
    if lanes.slots and not norm.is_maximum(p):
        poison = _poison(lanes.proof(payload), p)
        group_norms = torch.where(torch.isfinite(group_norms), group_norms + poison, group_norms)
        if lanes.groups == 1:
            total_norm = group_norms[0]
        else:
            total_norm = torch.where(torch.isfinite(total_norm), total_norm + poison, total_norm)
    found = Measured(payload, norms, group_norms, total_norm, plan, p, local, wholes, sketches)
    found.unit = unit
    return found


def _poison(proof: Tensor, p: float) -> Tensor:
    """Return NaN where a sampled value is not finite, else 0.

    Copies are read in parts: where each rank's part was fine, the sample may still show a fault.
    """
    if p != 0:
        return proof[:, :SKETCH].sum() * 0
    # An infinity counts like any number here; in the scale, a square, it does not turn into NaN.
    return torch.where(proof[:, SKETCH].sum().isnan(), torch.nan, 0.0)
