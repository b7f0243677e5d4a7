"""Hugging Face Accelerate: ``accelerator.clip_grad_norm_`` by shardclip."""

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from shardclip import extras
from shardclip.clipping import GradClipper
from shardclip.step import ClipResult

from .clipping import Clipping

extras.require("accelerate", "1.10", extra="accelerate")

_ASKED = {"FSDP": "ACCELERATE_USE_FSDP", "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED"}
"""What Accelerate itself sets where such a plugin is passed or configured."""

Clip = Callable[..., Tensor | None]


def attach(
    accelerator: Any, *models: nn.Module, max_norm: float | None = None, **options: Any
) -> Clipping:
    """Make ``accelerator.clip_grad_norm_`` shardclip's, once, after ``accelerator.prepare``.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        clipping = attach(accelerator, model)
        ...
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)  # as ever
                optimizer.step()

    In micro-batches that only accumulate (``accelerator.sync_gradients`` is False) it does nothing
    and returns None, so that the line needs no ``if``. fp16 gradients are unscaled first.

    Under DeepSpeed ``accelerator.backward`` has stepped already, clipped by shardclip on the way;
    ``accelerator.clip_grad_norm_`` then only returns that step's norm.

    Args:
        accelerator: The Accelerator.
        models: The models that ``prepare`` returned.
        max_norm: Under DeepSpeed, what to clip to; by default the plugin's ``gradient_clipping``.
            Elsewhere the loop's own line says it.
        options: ``GradClipper``'s ``group``, ``layout``, ``nonfinite`` and ``norms``.

    Returns:
        What holds the last step's ``result``, a ``ClipResult``.

    Raises:
        RuntimeError: Accelerate runs something else than it was asked for: on CPU, and with
            ``cpu=True``, it trains by DDP where FSDP or DeepSpeed was asked for, and says nothing.
        ValueError: No model was given, or Accelerate runs what keeps its gradients elsewhere. From
            ``accelerator.clip_grad_norm_`` under DeepSpeed: it asks for another ``max_norm``.

    Communication:
        Here a few all-gathers for each model, as ``GradClipper``; then one all-reduce a step.
    """
    _check(accelerator, models)
    if accelerator.distributed_type == "DEEPSPEED":
        clipping, clip = _in_engine(accelerator, models[0], max_norm, options)
    else:
        clipping, clip = _on_call(accelerator, models, options)
    accelerator.clip_grad_norm_ = clip
    return clipping


def _on_call(
    accelerator: Any, models: tuple[nn.Module, ...], options: dict[str, Any]
) -> tuple[Clipping, Clip]:
    clipping = Clipping(models, **options)

    def clip_grad_norm_(
        parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        if not accelerator.sync_gradients:
            return None
        accelerator.unscale_gradients()
        return clipping.clip_(parameters, max_norm, norm_type)

    return clipping, clip_grad_norm_


def _in_engine(
    accelerator: Any, engine: Any, limit: float | None, options: dict[str, Any]
) -> tuple[Clipping, Clip]:
    if limit is None:
        limit = engine.gradient_clipping() or math.inf
    clipper: Any = GradClipper.from_deepspeed(engine, limit, **options)
    clipping = Clipping([])
    clip_ = clipper.clip_

    def noted_clip_(*args: Any, **kwargs: Any) -> ClipResult:
        result: ClipResult = clip_(*args, **kwargs)
        clipping.note(result)
        return result

    clipper.clip_ = noted_clip_  # what engine.step() calls

    def clip_grad_norm_(
        parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        if (max_norm, norm_type) not in {(limit, 2), (math.inf, 2)}:
            raise ValueError(
                f"clip_grad_norm_ asks for max_norm={max_norm}, norm_type={norm_type}, but under "
                f"DeepSpeed accelerator.backward has stepped already, with {limit} and 2; say it "
                "before: attach(accelerator, model, max_norm=...)"
            )
        if not accelerator.sync_gradients or clipping.result is None:
            return None
        return clipping.result.total_norm

    return clipping, clip_grad_norm_


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
