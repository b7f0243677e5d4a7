"""What a user would call instead: torch's functions, and those of other packages as they ship."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Gradients

from .clipping import MANY_MESHES, PLAIN, STEPPED, Clipping, Contender, fused_adamw


def _without(package: str) -> Callable[[], str | None]:
    """Say that a package is not there, if so; it is imported only where it is called."""

    def lacking() -> str | None:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install -e .[bench]"
        return None

    return lacking


def _torch(gradients: Gradients) -> Clipping:
    return Clipping(lambda max_norm: torch.nn.utils.clip_grad_norm_(gradients.parameters, max_norm))


def _torch_step(gradients: Gradients) -> Clipping:
    optimizer = fused_adamw(gradients)

    def step(max_norm: float) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(gradients.parameters, max_norm)
        optimizer.step()
        return norm

    return Clipping(step)


def _fsdp1(gradients: Gradients) -> Clipping:
    return Clipping(gradients.target.clip_grad_norm_)


def _accelerate(gradients: Gradients) -> Clipping:
    accelerator: Any = importlib.import_module("accelerate").Accelerator(cpu=True)
    return Clipping(lambda max_norm: accelerator.clip_grad_norm_(gradients.parameters, max_norm))


def _torchtitan(gradients: Gradients) -> Clipping:
    clip: Any = importlib.import_module("torchtitan.distributed.utils").clip_grad_norm_
    experts = gradients.case.layout == "two-meshes"
    return Clipping(
        lambda max_norm: clip(gradients.parameters, max_norm, foreach=True, ep_enabled=experts)
    )


def _deepspeed(gradients: Gradients) -> Clipping:
    def norm(_: float) -> Tensor:
        # The step's own norm: it is given times the loss scale, which is one here.
        return torch.as_tensor(gradients.engine.scaled_global_norm())

    return Clipping(norm)


_FSDP1, _ZERO2 = frozenset({"fsdp1"}), frozenset({"zero2"})

BASELINES = (
    Contender("torch clip_grad_norm_", "clip", _torch, PLAIN | MANY_MESHES, first=True),
    Contender("FSDP1 clip_grad_norm_", "clip", _fsdp1, _FSDP1, first=True),
    Contender("accelerate", "clip", _accelerate, MANY_MESHES, _without("accelerate")),
    Contender("torchtitan", "clip", _torchtitan, MANY_MESHES, _without("torchtitan")),
    Contender("torch clip, AdamW.step", "step", _torch_step, STEPPED),
    Contender("DeepSpeed norm", "norm", _deepspeed, _ZERO2, _without("deepspeed")),
)
"""torch's function gives each rank's own norm under FSDP1, where the module's method is compared;
accelerate calls torch's function on plain tensors, and torchtitan clips DTensors alone."""
