"""The settings of a GradClipper that are checked together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardclip.comm import Lanes, World
from shardclip.layout import Planner, Source
from shardclip.math import DOUBLE, SINGLE, norm
from shardclip.rules import Rule

from . import agreement

POLICIES = ("propagate", "raise", "skip")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "nonfinite": POLICIES,
    "norms": (None, "parameter", "module"),
    "on_drift": ("raise", "warn"),
}


@dataclass(frozen=True)
class ClipSettings:
    """What a GradClipper does beside clipping; each field is the argument of its name.

    Raises:
        ValueError: A value is none of the choices, or two of them exclude each other.
    """

    norm_type: float = 2.0
    nonfinite: str = "propagate"
    norms: str | None = None
    also: tuple[str, ...] = ()
    check_replicas: int = 0
    on_drift: str = "raise"
    max_consecutive_skips: int | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        """Check each by itself, and then what excludes what."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                shown = ", ".join(map(repr, choices))
                raise ValueError(f"{name} must be one of {shown}, got {value!r}")
        if self.check_replicas < 0:
            raise ValueError(
                "check_replicas must be False, True or a number of steps, got "
                f"{self.check_replicas!r}"
            )
        if self.max_consecutive_skips is not None and self.max_consecutive_skips < 1:
            raise ValueError(
                f"max_consecutive_skips must be at least 1, got {self.max_consecutive_skips}"
            )
        if self.maximum and self.also:
            raise ValueError("also= sums, and p = inf takes the maximum; drop one")
        if self.maximum and self.check_replicas:
            raise ValueError("check_replicas= needs sums, and p = inf takes the maximum; drop one")

    @property
    def maximum(self) -> bool:
        """Whether sums are maxima: p is inf."""
        return norm.is_maximum(self.norm_type)

    def agree(
        self,
        sources: Sequence[Source],
        planner: Planner,
        groups: list[dict[str, Any]],
        problems: list[tuple[str, str]],
    ) -> agreement.Agreement:
        """Agree with all ranks on these settings and on lanes; param groups may be appended."""
        agreed = agreement.reach(
            sources,
            planner,
            agreement.Settings(
                self.norm_type,
                self.nonfinite,
                self.norms,
                self.also,
                self.check_replicas,
                self.max_consecutive_skips,
                self.exact,
            ),
            [group.get("max_norm", "default") for group in groups],
            problems,
        )
        more = agreed.limits[len(groups) :]  # another rank has more
        groups += [{} if limit == "default" else {"max_norm": limit} for limit in more]
        return agreed

    def lanes(self, groups: int, agreed: agreement.Agreement, world: World) -> Lanes:
        """Lay the payload out."""
        return Lanes(
            groups,
            len(agreed.keys),
            0 if self.maximum else agreed.slots,
            len(self.also),
            0 if self.maximum else world.size,
            checks=True,
            drift=self.check_replicas > 0,
            window=(DOUBLE if agreed.wide else SINGLE) if self.exact else None,
        )

    def compares_at(self, step: int) -> bool:
        """Whether copies are compared bit for bit after so many steps."""
        return self.check_replicas > 0 and step % self.check_replicas == 0

    def bound_to_all(self, rule: Rule | None) -> list[str]:
        """Name the arguments for which every rank must take part in every step."""
        given: Mapping[str, bool] = {
            "also=": bool(self.also),
            "check_replicas=": bool(self.check_replicas),
            "max_consecutive_skips=": self.max_consecutive_skips is not None,
            "max_norm= as a rule": rule is not None,
        }
        return [name for name, is_given in given.items() if is_given]
