"""Thresholds that follow the norm or the step, for ``GradClipper(max_norm=...)``.

Each is called once a step with the total norm, which has the same float64 bits on every rank, and
works with operations that round alike everywhere, one by one: so all ranks get the same threshold,
bit for bit, and nothing has to be communicated. State lies in a few float64 tensors beside the
norm; nothing is read back to the host.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardclip import compat
from shardclip.math import check_max_norm

State = dict[str, Tensor]


@dataclass(eq=False, kw_only=True)
class Threshold(ABC):
    """What the thresholds with a state have in common.

    A norm that is not finite gets a threshold, but enters no state. One object serves one
    ``GradClipper``, which keeps the state in its own ``state_dict()``.

    Args:
        max_norm: Holds besides, in the warm-up too: the threshold is never above it. The state does
            not see it.
        skip: Leave the optimizer's step out where the norm is above the threshold, rather than
            clip: the gradients stay as they are and ``ClipResult.skipped`` says so. What enters the
            state is the same.
    """

    max_norm: float = math.inf
    skip: bool = False

    def __post_init__(self) -> None:
        self.max_norm = check_max_norm(self.max_norm)
        self._state = self._first()

    @abstractmethod
    def _first(self) -> State:
        """Return the state before the first step."""

    @abstractmethod
    def _follow(self, state: State, total_norm: Tensor) -> tuple[Tensor, State]:
        """Return the threshold for a finite norm, and the state after it; change nothing."""

    @torch.no_grad()
    def __call__(self, total_norm: Tensor, step: int) -> Tensor:
        """Return this step's threshold and take the norm into the state.

        Args:
            total_norm: float64, 0-dim.
            step: Not used: what is counted is in the state.

        Returns:
            float64, 0-dim, on the norm's device; inf where nothing is to be clipped yet.

        Communication:
            None, and no host sync.
        """
        for name, kept in self._state.items():
            self._state[name] = compat.to_device(kept, total_norm.device)
        enters = torch.isfinite(total_norm)
        limit, after = self._follow(self._state, torch.where(enters, total_norm, 0.0))
        for name, kept in self._state.items():  # in place: a CUDA graph keeps the addresses
            kept.copy_(torch.where(enters, after[name], kept))
        return limit.clamp(max=self.max_norm)

    def state_dict(self) -> State:
        """Return a copy of the state: tensors of fixed shapes, the same on every rank."""
        return {name: kept.clone() for name, kept in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned, as tensors or plain numbers.

        Raises:
            ValueError: It is another threshold's, or a window of another length; nothing changed.
        """
        given = {name: torch.as_tensor(value) for name, value in state.items()}
        shapes = {name: tuple(value.shape) for name, value in given.items()}
        wanted = {name: tuple(kept.shape) for name, kept in self._state.items()}
        if shapes != wanted:
            raise ValueError(
                f"max_norm: the state has {shapes}, but {self!r} takes {wanted}; load it into a "
                "threshold made as the saved one was"
            )
        for name, kept in self._state.items():
            kept.copy_(given[name])


@dataclass(eq=False)
class AutoClip(Threshold):
    """A percentile of the norms so far, this one among them (AutoClip).

    ``max_norm_t = percentile(norms_1 .. norms_t, p)``, interpolated linearly. Norms 4, 1, 3 and
    p = 50: the thresholds are 4, 2.5 and 3.

    Args:
        percentile: p, from 0 to 100; the paper finds 10 best.
        window: How many of the latest norms count; the paper keeps all. So many float64 numbers
            are kept, and sorted in each step.
        max_norm: As for every ``Threshold``.
        skip: As for every ``Threshold``.

    Raises:
        ValueError: An argument is out of its range.

    Communication:
        None, and no host sync.

    References:
        Seetharaman et al., 2020, arXiv:2007.14469, algorithm 1.
    """

    percentile: float = 10.0
    window: int = 1000

    def __post_init__(self) -> None:
        _check("percentile", self.percentile, 0, 100)
        _check("window", self.window, 1, math.inf)
        super().__post_init__()

    def _first(self) -> State:
        return {"norms": compat.on_host([math.inf] * self.window), "count": _count()}

    def _follow(self, state: State, total_norm: Tensor) -> tuple[Tensor, State]:
        slot = (state["count"] % self.window).view(1)
        norms = state["norms"].index_copy(0, slot, total_norm.view(1))
        count = state["count"] + 1
        last = count.clamp(max=self.window) - 1  # what is not filled yet is infinite: sorts behind
        place = last.double() * (self.percentile / 100)
        low = place.floor()
        ordered = norms.sort().values
        # take: indexing by a tensor of one number would read it on the host
        below = ordered.take(low.long())
        above = ordered.take((low.long() + 1).minimum(last))
        return below + (above - below) * (place - low), {"norms": norms, "count": count}


@dataclass(eq=False)
class ZClip(Threshold):
    """Clip norms that lie far above their running mean, by their z-score (ZClip).

    With mean m and variance v of the norms before, ``s = sqrt(v)`` and ``z = (norm - m) / (s +
    1e-6)``: where ``z > z_thresh`` the threshold is ``m + z_thresh**2 / z * s``, so that a larger
    spike is clipped further; else nothing is clipped. Then, of the clipped norm g,
    ``m = alpha * m + (1 - alpha) * g`` and ``v = alpha * v + (1 - alpha) * (g - m)**2``. For the
    first ``warmup_steps`` nothing is clipped; m and v are the plain mean and variance of those.

    Args:
        alpha: How much of mean and variance stays from step to step.
        z_thresh: The z-score above which a norm is a spike.
        warmup_steps: How many norms make the first mean and variance.
        max_norm: As for every ``Threshold``; the authors' program has 1 by default.
        skip: As for every ``Threshold``.

    Raises:
        ValueError: An argument is out of its range.

    Communication:
        None, and no host sync.

    References:
        Kumar et al., 2025, arXiv:2504.02507 ("adaptive scaling"); its program adds the 1e-6.
    """

    alpha: float = 0.97
    z_thresh: float = 2.5
    warmup_steps: int = 25

    def __post_init__(self) -> None:
        _check("alpha", self.alpha, 0, 1)
        _check("z_thresh", self.z_thresh, 0, math.inf)
        _check("warmup_steps", self.warmup_steps, 1, math.inf)
        super().__post_init__()

    def _first(self) -> State:
        return {"mean": compat.on_host(0.0), "var": compat.on_host(0.0), "count": _count()}

    def _follow(self, state: State, total_norm: Tensor) -> tuple[Tensor, State]:
        mean, var, before = state["mean"], state["var"], state["count"]
        warm, count = before < self.warmup_steps, before + 1
        first_mean = mean + (total_norm - mean) / count
        first_var = (var * before + (total_norm - mean) * (total_norm - first_mean)) / count
        std = var.sqrt()
        z = (total_norm - mean) / (std + 1e-6)
        spike = (z > self.z_thresh) & ~warm
        clipped = mean + self.z_thresh**2 / z * std
        norm = torch.where(spike, clipped, total_norm)
        new_mean = self.alpha * mean + (1 - self.alpha) * norm
        new_var = self.alpha * var + (1 - self.alpha) * (norm - new_mean).square()
        after = {
            "mean": torch.where(warm, first_mean, new_mean),
            "var": torch.where(warm, first_var, new_var),
            "count": count,
        }
        return torch.where(spike, clipped, math.inf), after


@dataclass(eq=False)
class RunningMean(Threshold):
    """A multiple of the running mean of the clipped norms.

    ``max_norm_t = multiple * m``; then ``m = beta * m + (1 - beta) * min(norm, max_norm_t)``. For
    the first ``warmup_steps`` nothing is clipped and m is the plain mean. With a multiple of 2 and
    beta = 0.5, norms 1, 3 and 9: the second is clipped to 2, m is then 1.5, and the third is
    clipped to 3.

    With ``skip=True`` such steps are left out instead. They still raise the mean a little, so
    that norms which stay high are let through in the end.

    Args:
        multiple: Of the mean.
        beta: How much of the mean stays from step to step.
        warmup_steps: How many norms make the first mean.
        max_norm: As for every ``Threshold``.
        skip: As for every ``Threshold``.

    Raises:
        ValueError: An argument is out of its range.

    Communication:
        None, and no host sync.

    References:
        OLMo's ``max_grad_norm_ratio`` (there for each parameter, here for the total norm).
    """

    multiple: float
    beta: float = 0.99
    warmup_steps: int = 1

    def __post_init__(self) -> None:
        _check("multiple", self.multiple, 0, math.inf)
        _check("beta", self.beta, 0, 1)
        _check("warmup_steps", self.warmup_steps, 1, math.inf)
        super().__post_init__()

    def _first(self) -> State:
        return {"mean": compat.on_host(0.0), "count": _count()}

    def _follow(self, state: State, total_norm: Tensor) -> tuple[Tensor, State]:
        mean, before = state["mean"], state["count"]
        warm, count = before < self.warmup_steps, before + 1
        limit = torch.where(warm, math.inf, self.multiple * mean)
        first = mean + (total_norm - mean) / count
        new = self.beta * mean + (1 - self.beta) * total_norm.minimum(limit)
        return limit, {"mean": torch.where(warm, first, new), "count": count}


@dataclass(frozen=True)
class LinearWarmup:
    """A threshold that goes from one value to another in so many steps, and stays there.

    ``start + (end - start) * min(1, step / steps)``. It has no state but the clipper's count of
    steps. A CUDA graph would keep the value of the step in which it was captured.

    Args:
        start: For the first step.
        end: From the step with this number on.
        steps: How many steps it takes.

    Raises:
        ValueError: A value is negative or NaN, or there are no steps.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_max_norm(self.start, "start")
        check_max_norm(self.end, "end")
        _check("steps", self.steps, 1, math.inf)

    def __call__(self, total_norm: Tensor, step: int) -> float:
        """Return the threshold of the step with this number, counted from 0."""
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)


def _check(what: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{what} must be from {least} to {most}, got {value!r}")


def _count() -> Tensor:
    return compat.on_host(0, torch.int64)
