"""What one step of a GradClipper found and did."""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from . import norm, verdict
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
    ) -> None:
        """Take what the clipper worked out.

        Args:
            measured: The measurement.
            coefs: float64 coefficients of the param groups, on the payload's device.
            keys: Names of the norms.
            sums: Names of the caller's numbers.
            skipped: Whether the step was skipped.
            nonfinite: This rank's parameters that are not finite, where that is known already.
        """
        like = measured.like()
        self.total_norm = measured.total_norm.to(like, copy=True)
        self.clip_coef = coefs.amin().to(like)
        self._measured = measured.without_gradients()
        self._coefs = coefs
        self._keys = tuple(keys)
        self._sums = tuple(sums)
        self._skipped = skipped
        self._nonfinite = nonfinite

    @cached_property
    def _host(self) -> tuple[list[float], list[float], float, list[float]]:
        """Read everything at once: group norms, coefficients, total, and the other lanes."""
        measured, groups = self._measured, self._measured.plan.lanes.groups
        keys = measured.norms[groups:]
        added = measured.payload[measured.plan.lanes.added]
        parts = [measured.group_norms, self._coefs, measured.total_norm.view(1), keys, added]
        values = torch.cat(parts).tolist()
        rest = values[2 * groups + 1 :]
        return values[:groups], values[groups : 2 * groups], values[2 * groups], rest

    @property
    def _smallest(self) -> float:
        coefs = self._host[1]
        return math.nan if any(map(math.isnan, coefs)) else min(coefs)

    @property
    def finite(self) -> bool:
        """Whether the total norm is neither NaN nor infinite."""
        return math.isfinite(self._host[2])

    @property
    def clipped(self) -> bool:
        """Whether any gradient was scaled down."""
        return self.finite and not self.skipped and any(coef < 1 for coef in self._host[1])

    @property
    def skipped(self) -> bool:
        """Whether the gradients were left alone as not finite; then do not step."""
        if isinstance(self._skipped, Tensor):
            self._skipped = bool(self._skipped)
        return self._skipped

    @property
    def group_norms(self) -> tuple[float, ...]:
        """Each param group's norm before clipping."""
        return tuple(self._host[0])

    @property
    def group_coefs(self) -> tuple[float, ...]:
        """What each param group's gradients were multiplied by."""
        return tuple(self._host[1])

    @property
    def clipped_norm(self) -> float:
        """The norm of all gradients after clipping."""
        p = self._measured.p
        norms, coefs, total, _ = self._host
        if self.skipped or all(coef == 1 for coef in coefs):
            return total
        if p == 0:
            return sum(n for n, coef in zip(norms, coefs, strict=True) if coef != 0)
        scaled = [n * coef for n, coef in zip(norms, coefs, strict=True)]
        if not all(map(math.isfinite, scaled)):
            return math.nan
        largest = max(scaled)
        if norm.is_maximum(p) or largest == 0:
            return largest
        return float(largest * math.fsum((n / largest) ** p for n in scaled) ** (1 / p))

    @property
    def norms(self) -> dict[str, float]:
        """The norms by parameter or module, over all ranks; empty unless they were asked for."""
        return dict(zip(self._keys, self._host[3], strict=False))

    @property
    def sums(self) -> dict[str, float]:
        """The caller's numbers, summed over all ranks."""
        return dict(
            zip(self._sums, self._host[3][len(self._host[3]) - len(self._sums) :], strict=True)
        )

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
        out = {
            "total_norm": self._host[2],
            "clip_coef": self._smallest,
            "clipped_norm": self.clipped_norm,
            "clipped": float(self.clipped),
            "finite": float(self.finite),
            "skipped": float(self.skipped),
        }
        out.update({f"norm/{name}": value for name, value in self.norms.items()})
        out.update({f"sum/{name}": value for name, value in self.sums.items()})
        return out

    def __repr__(self) -> str:
        total, coef = self._host[2], self._smallest
        if self.skipped:
            what = "skipped, gradients untouched"
        elif self.clipped:
            what = f"clipped by {coef:.4g} to {self.clipped_norm:.4g}"
        else:
            what = "not clipped" if self.finite else "not finite, propagated"
        named = f"; not finite: {', '.join(self.nonfinite_parameters)}" if not self.finite else ""
        return f"ClipResult(norm {total:.6g}, {what}{named})"
