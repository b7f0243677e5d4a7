"""One rank's gradients of a case, and what they were at first."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .case import Case


class UnavailableError(RuntimeError):
    """A framework cannot build its layout here."""


@dataclass(frozen=True)
class Gradients:
    """One rank's parameters with their gradients.

    Attributes:
        case: What they are of.
        target: What is handed to a function that clips: a list of parameters, or a module.
        parameters: The parameters themselves.
        locals: The gradients' values on this rank.
        saved: What `locals` held at first.
        norm: The true global norm, in float64.
        attach: Gives every parameter a new gradient over `locals`, as a backward does.
        engine: DeepSpeed's optimizer, where it holds the gradients.
    """

    case: Case
    target: Any
    parameters: list[nn.Parameter]
    locals: list[Tensor]
    saved: list[Tensor]
    norm: float
    attach: Callable[[], None]
    engine: Any = None

    @property
    def bytes(self) -> int:
        """Bytes of this rank's gradients."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.locals)

    def restore(self) -> None:
        """Give every parameter a new gradient with the values that it had at first."""
        for local, saved in zip(self.locals, self.saved, strict=True):
            local.copy_(saved)
        self.attach()


def true_norm(tensors: Sequence[Tensor], copies: Sequence[int]) -> float:
    """Return the float64 norm of all ranks' tensors, each divided among those that hold it."""
    squares = torch.zeros((), dtype=torch.float64)
    for tensor, holders in zip(tensors, copies, strict=True):
        for part in torch.split(tensor.reshape(-1), 1 << 22):
            squares += part.double().square().sum() / holders
    if dist.is_initialized():
        dist.all_reduce(squares)
    return math.sqrt(float(squares))
