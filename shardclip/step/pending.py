"""A step of a GradClipper under way: between the start of its all-reduce and its result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from shardclip.comm import World
from shardclip.rules import Limit

from .collect import Collected
from .measure import Measured, Started
from .result import ClipResult


@dataclass(frozen=True)
class Begun:
    """A step that has begun.

    Attributes:
        started: Its measurement.
        found: What was collected for it.
        limits: The param groups' thresholds.
        world: The ranks that it is reduced over.
        scaler: The GradScaler that has scaled its loss.
        optimizers: Those whose gradients it has scaled.
    """

    started: Started
    found: Collected
    limits: Sequence[Limit]
    world: World
    scaler: GradScaler | None = None
    optimizers: Sequence[Optimizer] = ()


@dataclass(frozen=True)
class Judged:
    """A step that nothing is wrong with, before any gradient is touched.

    Attributes:
        measured: The norms.
        coefs: float64, the param groups' coefficients.
        factors: What their gradients are multiplied by: the coefficients, or with a loss scale's
            inverse; 1 where they stay as they are.
        stops: 0-dim bool: whether the optimizer's step is to be left out; None where it never is.
        skipped: The same as far as it is known on the host, else ``stops``.
        names: This rank's parameters that are not finite; None where the norm is finite or nobody
            has looked.
        limits: The param groups' thresholds.
    """

    measured: Measured
    coefs: Tensor
    factors: Tensor
    stops: Tensor | None
    skipped: bool | Tensor
    names: list[str] | None
    limits: Sequence[float] | Tensor


class Pending:
    """A step whose all-reduce is under way, from ``GradClipper.start()``."""

    def __init__(self, begun: Begun, finish: Callable[[Begun], ClipResult]) -> None:
        """Take the step and what finishes it."""
        self._begun: Begun | None = begun
        self._finish = finish

    def finish(self) -> ClipResult:
        """Wait for the all-reduce and clip; all ranks must call it.

        Returns:
            As ``GradClipper.clip_``.

        Raises:
            RuntimeError: It was called before.
            ValueError, NonFiniteGradientError, ReplicaMismatchError: As ``GradClipper.clip_``.

        Communication:
            None but the all-reduce that was started. Host syncs as in ``clip_``.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            raise RuntimeError("finish() was already called; start() begins the next step")
        return self._finish(begun)
