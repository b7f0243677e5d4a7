"""What one step found and did, as plain numbers on the host; knows nothing of torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """One step of a GradClipper in plain numbers; what a record keeps and a file holds.

    Attributes:
        total_norm: The norm of all gradients before clipping.
        group_norms: Each param group's norm before clipping.
        group_coefs: What each param group's gradients were multiplied by.
        max_norms: Each param group's threshold; inf where there was none.
        norms: Norms by parameter or by module, over all ranks; empty unless they were asked for.
        sums: The caller's numbers, summed over all ranks.
        norm_type: The p of all these norms.
        skipped: Whether the gradients were left alone as not finite.
        step: The clipper's step, the first one 1.
        time: When the host made the call, in seconds since the epoch.
    """

    total_norm: float
    group_norms: tuple[float, ...]
    group_coefs: tuple[float, ...]
    max_norms: tuple[float, ...]
    norms: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    norm_type: float = 2.0
    skipped: bool = False
    step: int = 0
    time: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether the total norm is neither NaN nor infinite."""
        return math.isfinite(self.total_norm)

    @property
    def clip_coef(self) -> float:
        """The smallest of the groups' coefficients; NaN if one is."""
        return math.nan if any(map(math.isnan, self.group_coefs)) else min(self.group_coefs)

    @property
    def max_norm(self) -> float:
        """The threshold where all groups have the same, else NaN."""
        return self.max_norms[0] if len(set(self.max_norms)) == 1 else math.nan

    @property
    def clipped(self) -> bool:
        """Whether any gradient was scaled down."""
        return self.finite and not self.skipped and any(coef < 1 for coef in self.group_coefs)

    @property
    def clipped_norm(self) -> float:
        """The norm of all gradients after clipping."""
        p, coefs = self.norm_type, self.group_coefs
        if self.skipped or all(coef == 1 for coef in coefs):
            return self.total_norm
        pairs = list(zip(self.group_norms, coefs, strict=True))
        if p == 0:
            return sum(n for n, coef in pairs if coef != 0)
        return combine([n * coef for n, coef in pairs], p)

    def as_dict(self) -> dict[str, float]:
        """Return plain numbers for a logger, norms and sums among them."""
        out = {
            "total_norm": self.total_norm,
            "clip_coef": self.clip_coef,
            "clipped_norm": self.clipped_norm,
            "clipped": float(self.clipped),
            "finite": float(self.finite),
            "skipped": float(self.skipped),
        }
        out.update({f"norm/{name}": value for name, value in self.norms.items()})
        out.update({f"sum/{name}": value for name, value in self.sums.items()})
        return out


def combine(norms: Sequence[float], p: float) -> float:
    """Return the norm of a whole from the norms of its parts, in float64 without overflow.

    NaN where a part is not finite.
    """
    if not all(map(math.isfinite, norms)):
        return math.nan
    if p == 0:
        return math.fsum(norms)
    largest = max(norms, default=0.0)
    if math.isinf(p) or largest == 0:
        return largest
    try:
        return float(largest * math.fsum((n / largest) ** p for n in norms) ** (1 / p))
    except OverflowError:  # of a p close to 0
        return math.inf


@dataclass(frozen=True)
class Heading:
    """What the host knows of a step at once, and the order of the numbers that it does not.

    Attributes:
        groups: How many param groups there are.
        keys: Names of the norms.
        sums: Names of the caller's numbers.
        norm_type: The p of the norms.
        max_norms: The thresholds (None: without one); None where they are among the numbers.
        skipped: Whether the step was skipped; None where that is among the numbers.
        step: The clipper's step.
        time: When the host made the call.
    """

    groups: int
    keys: tuple[str, ...]
    sums: tuple[str, ...]
    norm_type: float
    max_norms: tuple[float | None, ...] | None
    skipped: bool | None
    step: int
    time: float

    def outcome(self, numbers: Sequence[float]) -> Outcome:
        """Read the numbers.

        Args:
            numbers: The total norm; the groups' norms, their coefficients, and their thresholds if
                those are not known here; whether the step was skipped, likewise; norms; sums.
        """
        rest = iter(numbers)

        def take(count: int) -> tuple[float, ...]:
            return tuple(next(rest) for _ in range(count))

        (total,) = take(1)
        group_norms, group_coefs = take(self.groups), take(self.groups)
        limits = take(self.groups) if self.max_norms is None else self.max_norms
        skipped = bool(take(1)[0]) if self.skipped is None else self.skipped
        return Outcome(
            total,
            group_norms,
            group_coefs,
            tuple(math.inf if limit is None else float(limit) for limit in limits),
            dict(zip(self.keys, take(len(self.keys)), strict=True)),
            dict(zip(self.sums, take(len(self.sums)), strict=True)),
            self.norm_type,
            skipped,
            self.step,
            self.time,
        )
