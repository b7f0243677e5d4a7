"""What one step of a GradClipper found and did."""

import time
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from shardclip.record import Heading, Outcome

from . import verdict
from .inspection import NonFinite
from .measure import Measured


class ClipResult:
    """The outcome of one ``GradClipper.clip_()``. Reading it never communicates.

    ``total_norm`` and ``clip_coef`` are there at once, with no host sync. Everything else is read
    from the device on demand, at one host sync.

    Attributes:
        total_norm: The norm of all gradients before clipping; 0-dim, float32, or float64 where this
            rank has float64 gradients, on the gradients' device.
        clip_coef: What gradients were multiplied by; 0-dim, of the same dtype and device. With
            several param groups the smallest of theirs.
        heading: What is known of the step without a host sync.
    """

    def __init__(
        self,
        measured: Measured,
        coefs: Tensor,
        *,
        keys: Sequence[str] = (),
        sums: Sequence[str] = (),
        skipped: bool | Tensor = False,
        nonfinite: Sequence[str] | None = None,
        max_norms: Sequence[float | None] | Tensor | None = None,
        step: int = 0,
    ) -> None:
        """Take what the clipper worked out.

        Args:
            measured: The measurement.
            coefs: float64 coefficients of the param groups, on the payload's device.
            keys: Names of the norms.
            sums: Names of the caller's numbers.
            skipped: Whether the step was skipped; a 0-dim tensor where only the device knows.
            nonfinite: This rank's parameters that are not finite, where that is known already.
            max_norms: The param groups' thresholds; a tensor where only the device knows them.
            step: The clipper's step, the first one 1.
        """
        kind = measured.kind()
        self.total_norm = measured.total_norm.to(*kind, copy=True)
        self.clip_coef = coefs.amin().to(*kind)
        measured.forget_gradients()
        self._measured = measured
        self._coefs = coefs
        # What only the device knows travels with the rest of the numbers.
        self._max_norms = max_norms if isinstance(max_norms, Tensor) else None
        self._skipped = skipped if isinstance(skipped, Tensor) else None
        groups = measured.plan.lanes.groups
        self.heading = Heading(
            groups,
            tuple(keys),
            tuple(sums),
            measured.p,
            None if isinstance(max_norms, Tensor) else tuple(max_norms or (None,) * groups),
            None if isinstance(skipped, Tensor) else skipped,
            step,
            time.time(),
        )
        self._nonfinite = nonfinite

    def packed(self) -> Tensor:
        """Gather every number in one new float64 tensor on the device, without a host sync.

        Returns:
            1-dim, in the order that ``heading.outcome`` reads.
        """
        measured, groups = self._measured, self.heading.groups
        parts = [measured.total_norm.view(1), measured.group_norms, self._coefs]
        late = [told for told in (self._max_norms, self._skipped) if told is not None]
        parts += [told.to(measured.total_norm).reshape(-1) for told in late]
        if self.heading.keys:
            parts.append(measured.norms[groups:])
        if self.heading.sums:
            parts.append(measured.payload[measured.plan.lanes.added])
        return torch.cat(parts)

    @cached_property
    def outcome(self) -> Outcome:
        """Everything in plain numbers; one host sync."""
        return self.heading.outcome(self.packed().tolist())

    @property
    def finite(self) -> bool:
        """Whether the total norm is neither NaN nor infinite."""
        return self.outcome.finite

    @property
    def clipped(self) -> bool:
        """Whether any gradient was scaled down."""
        return self.outcome.clipped

    @property
    def skipped(self) -> bool:
        """Whether the gradients were left alone, as not finite or a spike; then do not step."""
        known = self.heading.skipped
        return self.outcome.skipped if known is None else known

    @property
    def group_norms(self) -> tuple[float, ...]:
        """Each param group's norm before clipping."""
        return self.outcome.group_norms

    @property
    def group_coefs(self) -> tuple[float, ...]:
        """What each param group's gradients were multiplied by."""
        return self.outcome.group_coefs

    @property
    def clipped_norm(self) -> float:
        """The norm of all gradients after clipping."""
        return self.outcome.clipped_norm

    @property
    def norms(self) -> dict[str, float]:
        """The norms by parameter or module, over all ranks; empty unless they were asked for."""
        return dict(self.outcome.norms)

    @property
    def sums(self) -> dict[str, float]:
        """The caller's numbers, summed over all ranks."""
        return dict(self.outcome.sums)

    @property
    def nonfinite(self) -> tuple[NonFinite, ...]:
        """What was not finite on any rank: parameter, ranks, counts, index of the first element.

        Gathered by ``nonfinite="skip"`` where it is decided on the host; else empty.
        """
        return self._measured.nonfinite

    @property
    def nonfinite_parameters(self) -> tuple[str, ...]:
        """Names of parameters with a NaN or an infinity: this rank's, or all in ``nonfinite``."""
        if self.nonfinite:
            return tuple(found.name for found in self.nonfinite)
        if self._nonfinite is None:
            self._nonfinite = () if self.finite else verdict.nonfinite_names(self._measured)
        return tuple(self._nonfinite)

    def as_dict(self) -> dict[str, float]:
        """Return plain numbers for a logger, norms and sums among them."""
        return self.outcome.as_dict()

    def __repr__(self) -> str:
        outcome = self.outcome
        if self.skipped:
            what = "skipped, gradients untouched"
        elif outcome.clipped:
            what = f"clipped by {outcome.clip_coef:.4g} to {outcome.clipped_norm:.4g}"
        else:
            what = "not clipped" if outcome.finite else "not finite, propagated"
        named = f"; not finite: {', '.join(self.nonfinite_parameters)}" if not self.finite else ""
        return f"ClipResult(norm {outcome.total_norm:.6g}, {what}{named})"
