"""What is compared: shardclip's two ways to clip, and what a user of torch would call instead."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardclip

Parameters = list[nn.Parameter]
Clip = Callable[[float], Tensor]
"""Clips the gradients to a `max_norm` and returns their total norm."""


@dataclass(frozen=True)
class Contender:
    """A way to clip.

    Attributes:
        name: As a user would write it.
        make: Does what is done once per set of parameters, and returns what is done every step.
    """

    name: str
    make: Callable[[Parameters], Clip]


def _torch(parameters: Parameters) -> Clip:
    return lambda max_norm: torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def _function(parameters: Parameters) -> Clip:
    return lambda max_norm: shardclip.clip_grad_norm_(parameters, max_norm)


def _clipper(parameters: Parameters) -> Clip:
    clipper = shardclip.GradClipper(parameters, max_norm=1.0)

    def clip(max_norm: float) -> Tensor:
        clipper.max_norm = max_norm
        result: shardclip.ClipResult = clipper.clip_()
        return result.total_norm

    return clip


BASELINE = Contender("torch.nn.utils.clip_grad_norm_", _torch)
CONTENDERS = (
    BASELINE,
    Contender("shardclip.clip_grad_norm_", _function),
    Contender("GradClipper.clip_", _clipper),
)


def read(norm: Tensor) -> float:
    """Read a norm as a logger would; torch's is a DTensor whose reduction is still to come."""
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
