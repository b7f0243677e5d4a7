"""What all sinks share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

from shardclip.record.outcome import Outcome


class HasOutcome(Protocol):
    """A ``ClipResult``, of which a sink needs only the numbers."""

    @property
    def outcome(self) -> Outcome:
        """The step in plain numbers."""
        ...


class Sink:
    """Where steps can be sent; the others derive from it and write one step in ``_put``.

    Args:
        every: Write one step of so many, and every one that is not finite or was skipped.
        norms_every: Write the norms by parameter or module in one step of so many; 0: never. They
            are there if the clipper was built with ``norms=``.

    Raises:
        ValueError: A number of steps is not positive.
    """

    def __init__(self, *, every: int = 1, norms_every: int = 0) -> None:
        if every < 1 or norms_every < 0:
            raise ValueError(
                f"every must be at least 1 step and norms_every at least 0, got {every} and "
                f"{norms_every}"
            )
        self.every, self.norms_every = every, norms_every
        self._written = 0

    def write(self, result: HasOutcome | Outcome, step: int | None = None) -> None:
        """Write one step, if it is one that is written.

        Args:
            result: The ``ClipResult`` of ``clip_()`` (reading it is one host sync on CUDA), or what
                ``clipper.record`` keeps.
            step: Its number; None: the clipper's own.
        """
        outcome = result if isinstance(result, Outcome) else result.outcome
        self._written += 1
        number = step if step is not None else outcome.step or self._written
        if number % self.every == 0 or outcome.skipped or not outcome.finite:
            norms = self.norms_every > 0 and number % self.norms_every == 0
            self._put(replace(outcome, step=number), norms=norms and bool(outcome.norms))

    def _put(self, step: Outcome, *, norms: bool) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Finish; what was opened by the caller stays open."""


def scalars(step: Outcome, prefix: str) -> dict[str, float]:
    """Name a step's numbers as loggers show them, all but the norms by name.

    Args:
        step: What it found and did.
        prefix: Stands before each name, with a slash.
    """
    named = {
        "total_norm": step.total_norm,
        "clipped_norm": step.clipped_norm,
        "clip_coef": step.clip_coef,
        "clipped": float(step.clipped),
        "skipped": float(step.skipped),
    }
    if math.isfinite(step.max_norm):
        named["max_norm"] = step.max_norm
    if len(step.group_norms) > 1:
        for index, norm in enumerate(step.group_norms):
            named[f"group{index}/norm"] = norm
            named[f"group{index}/coef"] = step.group_coefs[index]
            if math.isfinite(step.max_norms[index]):
                named[f"group{index}/max_norm"] = step.max_norms[index]
    named.update({f"sum/{name}": value for name, value in step.sums.items()})
    return {f"{prefix}/{name}": value for name, value in named.items()}


def finite_norms(step: Outcome) -> list[float]:
    """List the norms by name that a histogram can take."""
    return [value for value in step.norms.values() if math.isfinite(value)]
