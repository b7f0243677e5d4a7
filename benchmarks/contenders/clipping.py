"""What a contender is: built once for a set of gradients, then called every step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, Gradients

FIRST, USUAL, CLIPPED = "first", "usual", "clipped"
MANY_MESHES = frozenset({"fsdp2", "hsdp", "fsdp-tp", "two-meshes"})
PLAIN = frozenset({"plain", "ddp"})
STEPPED = frozenset({"plain", "ddp", "fsdp2", "hsdp"})
"""Layouts: of DTensors; of plain tensors; those where a step with an optimizer is timed."""

STEPS = (FIRST, USUAL, CLIPPED)
"""First: all that a new set of gradients costs, what is built once included, on the usual step.
Usual: the norm is half of `max_norm`. Clipped: it is twice `max_norm`."""

HEADROOM = {FIRST: 2.0, USUAL: 2.0, CLIPPED: 0.5}
"""`max_norm` in units of the norm."""


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Clipping:
    """What is done every step.

    Attributes:
        clip: Clips to a `max_norm` and returns the total norm. This is what is timed.
        backward: What it leaves to the backward pass, called before; its time stands beside.
    """

    clip: Callable[[float], Tensor]
    backward: Callable[[], None] = nothing


@dataclass(frozen=True)
class Contender:
    """A way to clip.

    Attributes:
        name: As a user would write it.
        does: "clip"; "step": clip and step an AdamW; "norm": the norm alone.
        make: Does what is done once for a set of gradients; every rank calls it.
        layouts: Where it can be used.
        lacking: Why it cannot be had here (a package that is not installed), or None.
        first: Whether its first call is timed. Those that call torch's function share torch's
            caches, which a process fills once.
        only_here: On CPU it takes a path that no device takes, so that what waits for a device
            cannot be counted.
    """

    name: str
    does: str
    make: Callable[[Gradients], Clipping]
    layouts: frozenset[str]
    lacking: Callable[[], str | None] = nothing
    first: bool = False
    only_here: bool = False

    def fits(self, case: Case) -> bool:
        """Whether it is compared in a case."""
        return case.layout in self.layouts and (self.does != "step" or case.shapes.count > 1)

    @property
    def steps(self) -> tuple[str, ...]:
        """Return the kinds of step that are timed."""
        if self.does == "norm":
            return (USUAL,)
        return STEPS if self.first else (USUAL, CLIPPED)


def read(norm: Tensor) -> float:
    """Read a norm as a logger would; torch's is a DTensor whose reduction is still to come."""
    whole: Any = norm
    return float(whole.full_tensor() if hasattr(whole, "full_tensor") else norm)


def fused_adamw(gradients: Gradients) -> torch.optim.Optimizer:
    """Build the optimizer of the contenders that step."""
    return torch.optim.AdamW(gradients.parameters, lr=1e-6, fused=True)
