"""Hugging Face Accelerate: ``accelerator.clip_grad_norm_`` by shardclip."""

import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from . import require
from .clipping import Clipping

require("accelerate", "1.6")

_ASKED = {"FSDP": "ACCELERATE_USE_FSDP", "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED"}
"""What Accelerate itself sets where such a plugin is passed or configured."""


def attach(
    accelerator: Any, *models: nn.Module, max_norm: float | None = None, **options: Any
) -> Clipping:
    """Make ``accelerator.clip_grad_norm_`` shardclip's, once, after ``accelerator.prepare``. ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        clipping = attach(accelerator, model)
        ...
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)  # as ever
                optimizer.step()

    In micro-batches that only accumulate (``accelerator.sync_gradients`` is False) it does nothing
    and returns None, so that the line needs no ``if``. fp16 gradients are unscaled first.

    Args:
        accelerator: The Accelerator.
        models: The models that ``prepare`` returned.
        options: ``GradClipper``'s ``group``, ``layout``, ``nonfinite`` and ``norms``.

    Returns:
        What holds the last step's ``result``, a ``ClipResult``.

    Raises:
        RuntimeError: Accelerate runs something else than it was asked for: on CPU, and with
            ``cpu=True``, it trains by DDP where FSDP or DeepSpeed was asked for, and says nothing.
        ValueError: No model was given, or Accelerate runs what keeps its gradients elsewhere.

    Communication:
        Here a few all-gathers for each model, as ``GradClipper``. Then one all-reduce in each step.
    """
    _check(accelerator, models)
    clipping = Clipping(models, **options)

    def clip_grad_norm_(
        parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        if not accelerator.sync_gradients:
            return None
        accelerator.unscale_gradients()
        return clipping.clip_(parameters, max_norm, norm_type)

    accelerator.clip_grad_norm_ = clip_grad_norm_
    return clipping


def _check(accelerator: Any, models: tuple[nn.Module, ...]) -> None:
    kind = str(accelerator.distributed_type.value)
    if not models:
        raise ValueError("attach: give the models that accelerator.prepare returned")
    for asked, variable in _ASKED.items():
        wanted = os.environ.get(variable, "false").lower() == "true"
        if wanted and kind != asked and accelerator.num_processes > 1:
            raise RuntimeError(
                f"Accelerate was asked for {asked}, but runs {kind}: every rank holds the whole "
                f"model. It shards on accelerators only, and not with cpu=True; use those, or drop "
                f"the plugin ({variable})"
            )
    if kind in {"MEGATRON_LM", "XLA"}:
        raise ValueError(f"attach: gradients under {kind} are not where shardclip looks for them")
