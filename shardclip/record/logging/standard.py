"""Python's own logging."""

import logging
import math

from shardclip.record.outcome import Outcome

from .sink import Sink


class StandardLogging(Sink):
    """Write one line a step to a logger of the ``logging`` module.

    A step that is not finite or is skipped is a warning, whatever ``every`` says.

    Args:
        logger: The logger or its name.
        level: Of ordinary steps.
        every: As in ``Sink``.
        norms_every: As in ``Sink``; the three largest are named.

    Raises:
        ValueError: As in ``Sink``.
    """

    def __init__(
        self,
        logger: logging.Logger | str = "shardclip",
        *,
        level: int = logging.INFO,
        every: int = 1,
        norms_every: int = 0,
    ) -> None:
        super().__init__(every=every, norms_every=norms_every)
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level

    def _put(self, step: Outcome, *, norms: bool) -> None:
        level = self._level if step.finite and not step.skipped else logging.WARNING
        if not self._logger.isEnabledFor(level):
            return
        if step.skipped:
            what = "skipped"
        elif not step.finite:
            what = "not finite"
        else:
            limit = "" if math.isnan(step.max_norm) else f" (max_norm {step.max_norm:g})"
            did = f"clipped by {step.clip_coef:.4g} to {step.clipped_norm:.4g}"
            what = f"{did if step.clipped else 'not clipped'}{limit}"
        largest = sorted(step.norms.items(), key=_size, reverse=True)[:3] if norms else []
        named = ", ".join(f"{name} {value:.4g}" for name, value in largest)
        self._logger.log(
            level,
            "step %d: gradient norm %.6g, %s%s",
            step.step,
            step.total_norm,
            what,
            f"; largest: {named}" if named else "",
        )


def _size(named: tuple[str, float]) -> float:
    """Sort by size, what is not finite first."""
    return named[1] if math.isfinite(named[1]) else math.inf
