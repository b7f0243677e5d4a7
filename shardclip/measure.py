"""One step's measurement: local sums, one all-reduce, and what every rank may conclude from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import adapters, compat, norm, reduce, replicas
from .payload import Flags
from .plan import Plan, locals_of, readings
from .world import World


@dataclass
class Measured:
    """What came out, the same bits on every rank.

    Attributes:
        payload: The reduced lanes.
        powers: Sums of |x|^p: the groups', then the keys'; with NaN restored for p = inf.
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
    """

    payload: Tensor
    powers: Tensor
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

    def targets(self, group: int) -> list[Tensor]:
        """List what is scaled in place for a param group."""
        pairs = zip(self.plan.seats, self.local, strict=True)
        return [adapters.storage(t) for seat, t in pairs if seat.source.group == group]

    def like(self) -> Tensor:
        """Return an empty tensor of the dtype and device that results take on this rank."""
        wide = any(t.dtype in (torch.float64, torch.complex128) for t in self.local)
        device = self.local[0].device if self.local else self.home
        return torch.empty(0, dtype=torch.float64 if wide else torch.float32, device=device)

    @property
    def proof(self) -> Tensor:
        """The reduced lanes of the proof, one row a slot."""
        return self.plan.lanes.proof(self.payload)

    def size(self) -> Tensor:
        """The L2 size of all gradients, which differences between copies are compared with.

        For other p it is estimated from the copies' samples alone.
        """
        if self.p == 2:
            return self.total_norm
        return self.proof[:, replicas.SKETCH].sum().sqrt()

    def flags(self) -> Flags:
        """Read the ranks' flags; a host sync where the payload is not on CPU."""
        lanes = self.plan.lanes
        return lanes.heard(self.payload[lanes.flags].tolist())

    def kept(self) -> list[bool]:
        """Tell for all that was read, from the kernel's sums of this step, what was not finite."""
        if self.each is None:
            return []
        return (~torch.isfinite(self.each)).tolist()

    def without_gradients(self) -> Measured:
        """Return the same without the gradients, which must not outlive their step."""
        return replace(self, local=[], wholes=[])


@torch.no_grad()
def measure(
    plan: Plan,
    grads: Sequence[Tensor | None],
    p: float,
    world: World,
    *,
    strict: bool = False,
    reads: bool = False,
    added: Sequence[float | Tensor] = (),
) -> Measured:
    """Sum what this rank owns and combine it with the other ranks': one all-reduce.

    Args:
        plan: Made for these gradients.
        grads: Those that the plan was made for.
        p: The norm type.
        world: Who takes part.
        strict: Ask for an error where the norm is not finite.
        reads: This rank will read the lanes in this step, even if that costs a host sync.
        added: Numbers to be summed over the ranks.
    """
    local = locals_of(plan, grads)
    parts, wholes = readings(plan, local)
    device = world.device or (parts[0].device if parts else torch.device("cpu"))
    sketches = sketch(plan, parts, wholes, device)
    payload = fill(plan, parts, wholes, sketches, p, device)
    reads = reads or reads_are_free(device)
    flags = Flags(bool(plan.seats), strict, not reads, bool(plan.problems))
    said = compat.on_host(plan.lanes.say(flags))
    payload[plan.lanes.flags] = compat.to_device(said, device)
    for index, value in enumerate(added):
        payload[plan.lanes.added.start + index] = value
    reduce.all_reduce(payload, world, maximum=norm.is_maximum(p))
    if reads:
        payload = payload.cpu()  # the one host sync of a step that reads
    found = conclude(plan, payload, p, local, wholes, sketches)
    found.read, found.each, found.home = reads, plan.each(), device
    return found


def reads_are_free(device: torch.device) -> bool:
    """Whether reading a payload on this device costs no host sync."""
    return device.type == "cpu"


def sketch(
    plan: Plan, parts: Sequence[Tensor], wholes: Sequence[Tensor], device: torch.device
) -> Tensor | None:
    """Take the fingerprints of what other ranks hold copies of."""
    if plan.problems or not plan.seats:
        return None
    proof = plan.tables(parts, wholes, device).proof
    held = [w for w, seat in zip(wholes, plan.seats, strict=True) if seat.copy is not None]
    return None if proof is None else proof.sketches(held)


def fill(
    plan: Plan,
    parts: list[Tensor],
    wholes: list[Tensor],
    sketches: Tensor | None,
    p: float,
    device: torch.device,
) -> Tensor:
    """Pack this rank's part of the payload."""
    lanes = plan.lanes
    payload = lanes.empty(device)
    if plan.problems or not plan.seats:
        return payload
    tables = plan.tables(parts, wholes, device)
    sums = compat.to_device(tables.kernel(parts, p), device)
    powers = payload[lanes.powers]
    if norm.is_maximum(p):
        found = sums[tables.source]
        powers.scatter_reduce_(0, tables.target, found.nan_to_num(0.0, torch.inf), "amax")
        payload[lanes.nans].scatter_reduce_(0, tables.target, found.isnan().double(), "amax")
        return payload
    powers.index_add_(0, tables.target, (sums * tables.weights)[tables.source])
    if tables.proof is not None and sketches is not None:
        tables.proof.contribute(lanes.proof(payload), sketches)
    return payload


def conclude(
    plan: Plan,
    payload: Tensor,
    p: float,
    local: list[Tensor],
    wholes: list[Tensor],
    sketches: Tensor | None,
) -> Measured:
    """Turn the reduced payload into norms; every rank does this alike, in float64."""
    lanes = plan.lanes
    powers = payload[lanes.powers]
    if norm.is_maximum(p):
        powers = torch.where(payload[lanes.nans] > 0, torch.nan, powers)
        total = powers[: lanes.groups].amax()
    else:
        total = powers[: lanes.groups].sum()
    group_norms = norm.finish(powers[: lanes.groups], p)
    total_norm = norm.finish(total, p)
    if lanes.slots and not norm.is_maximum(p):
        poison = _poison(lanes.proof(payload), p)
        group_norms = torch.where(torch.isfinite(group_norms), group_norms + poison, group_norms)
        total_norm = torch.where(torch.isfinite(total_norm), total_norm + poison, total_norm)
    return Measured(payload, powers, group_norms, total_norm, plan, p, local, wholes, sketches)


def _poison(proof: Tensor, p: float) -> Tensor:
    """Return NaN where a sampled value is not finite, else 0.

    Copies are read in parts: where each rank's part was fine, the sample may still show a fault.
    """
    if p != 0:
        return proof[:, : replicas.SKETCH].sum() * 0
    # An infinity counts like any number here; in the scale, a square, it does not turn into NaN.
    return torch.where(proof[:, replicas.SKETCH].sum().isnan(), torch.nan, 0.0)
