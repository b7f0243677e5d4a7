"""Hugging Face Trainer: ``TrainingArguments.max_grad_norm`` by shardclip, and logs of it."""

from typing import Any, ClassVar

from torch import Tensor, nn

from shardclip import extras

from . import accelerate
from .clipping import Clipping

extras.require("transformers", "5.0", extra="transformers")


class ShardclipMixin:
    """Mix it into any Trainer, before it.

    ::

        class ClippedTrainer(ShardclipMixin, Trainer):
            clip_options = {"nonfinite": "skip"}  # or leave it out


        ClippedTrainer(model, TrainingArguments(..., max_grad_norm=1.0), ...).train()

    Beside the Trainer's own ``grad_norm`` (before clipping) its logs have ``clipped_grad_norm``
    (after it), ``clip_coef``, both of the last step, and ``clipped_share``: of the steps since the
    last log, how many were scaled down. With ``max_grad_norm=0`` gradients are measured only.

    Attributes:
        clip_options: Options of ``GradClipper``: ``group``, ``layout``, ``nonfinite``, ``norms``.
        clipping: Holds the last step's ``result``, a ``ClipResult``; None before the first.

    Raises:
        RuntimeError, ValueError: As ``shardclip.integrations.accelerate.attach``.

    Communication:
        A few all-gathers in the first step, as ``GradClipper``; then one all-reduce in each step.
        Logging makes none; a few host syncs on CUDA.
    """

    clip_options: ClassVar[dict[str, Any]] = {}
    clipping: Clipping | None = None
    _clipped_model: nn.Module | None = None

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Take a micro-batch; the first one sees the model as Accelerate has wrapped it."""
        if model is not self._clipped_model:
            trainer: Any = self
            limit = trainer.args.max_grad_norm or None
            self.clipping = accelerate.attach(
                trainer.accelerator, model, max_norm=limit, **self.clip_options
            )
            self._clipped_model = model
        return super().training_step(model, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add what clipping did to a training log."""
        if self.clipping and self.clipping.result and "loss" in logs:
            result = self.clipping.result
            logs["clipped_grad_norm"] = result.clipped_norm
            logs["clip_coef"] = float(result.clip_coef)
            logs["clipped_share"] = self.clipping.clipped_share()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _mixed_mesh_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        # The Trainer goes around Accelerate where gradients lie on several meshes.
        trainer: Any = self
        return trainer.accelerator.clip_grad_norm_(model.parameters(), max_norm)
