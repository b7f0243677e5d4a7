"""Lightning: ``Trainer(gradient_clip_val=...)`` and ``fabric.clip_gradients`` by shardclip."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardclip import extras
from shardclip.step import parameters_of

from .clipping import Clipping

extras.require("lightning", "2.5", extra="lightning")

import lightning.pytorch as pl  # noqa: E402 - after the check, whose message is the clearer one
from lightning.fabric import Fabric  # noqa: E402

_DEEPSPEED = (
    "Lightning leaves clipping to DeepSpeed's engine under the DeepSpeed strategy; use "
    "GradClipper.from_deepspeed with the engine"
)


class ShardclipCallback(pl.Callback):
    """Clip in the Lightning Trainer, under every strategy but DeepSpeed's, FSDP among them.

    ::

        Trainer(gradient_clip_val=1.0, callbacks=[ShardclipCallback()], ...)

    It takes the place of the precision plugin's ``clip_grad_by_norm`` while ``fit`` runs, which is
    where ``configure_gradient_clipping`` and ``clip_gradients`` of a module end: whether it keeps
    Lightning's own hook or has one of its own, what they ask for is what is clipped to. Under FSDP
    Lightning refuses to clip by norm; with this callback it clips.

    Args:
        norm_type: 0, any p > 0, or inf.
        options: ``GradClipper``'s ``group``, ``layout``, ``nonfinite`` and ``norms``.

    Attributes:
        clipping: Holds the last step's ``result``, a ``ClipResult``; None before training.

    Raises:
        ValueError: When training starts: the strategy is DeepSpeed's, or nothing would be clipped.

    Communication:
        A few all-gathers when training starts, as ``GradClipper``; then one all-reduce for each
        optimizer step.
    """

    def __init__(self, *, norm_type: float = 2.0, **options: Any) -> None:
        self.clipping: Clipping | None = None
        self._norm_type = norm_type
        self._options = options

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Build the clippers and take over."""
        if type(trainer.strategy).__name__.startswith("DeepSpeed"):
            raise ValueError(_DEEPSPEED)
        hook = type(pl_module).configure_gradient_clipping
        own = hook is not pl.LightningModule.configure_gradient_clipping
        if pl_module.automatic_optimization and not own and not trainer.gradient_clip_val:
            raise ValueError(
                "ShardclipCallback: nothing would be clipped; give Trainer(gradient_clip_val=...), "
                "inf to measure only"
            )
        clipping = Clipping([trainer.model], **self._options)
        for optimizer in trainer.optimizers:
            clipping.clipper(parameters_of(optimizer), self._norm_type)

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            clipping.clip_(parameters_of(optimizer), clip_val, self._norm_type)

        self.clipping = clipping
        trainer.precision_plugin.clip_grad_by_norm = clip_grad_by_norm

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give back what was taken over."""
        vars(trainer.precision_plugin).pop("clip_grad_by_norm", None)


def attach(fabric: Fabric, *modules: nn.Module, **options: Any) -> Clipping:
    """Make ``fabric.clip_gradients(..., max_norm=...)`` shardclip's, once, after ``setup``.

    ::

        model, optimizer = fabric.setup(model, optimizer)
        clipping = attach(fabric, model)
        ...
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)  # as ever

    Args:
        fabric: The Fabric.
        modules: The modules that ``fabric.setup`` returned.
        options: ``GradClipper``'s ``group``, ``layout``, ``nonfinite`` (which then holds instead of
            ``error_if_nonfinite``) and ``norms``.

    Returns:
        What holds the last step's ``result``, a ``ClipResult``.

    Raises:
        ValueError: No module was given, or the strategy is DeepSpeed's.

    Communication:
        Here a few all-gathers for each module, as ``GradClipper``; then one all-reduce a step.
    """
    strategy = fabric.strategy
    if type(strategy).__name__.startswith("DeepSpeed"):
        raise ValueError(_DEEPSPEED)
    if not modules:
        raise ValueError("attach: give the modules that fabric.setup returned")
    clipping = Clipping(modules, **options)

    def clip_gradients_norm(
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        strategy.precision.unscale_gradients(optimizer)
        return clipping.clip_(
            parameters_of(optimizer), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    strategy.clip_gradients_norm = clip_gradients_norm
    return clipping
