"""DeepSpeed: clipping inside ``engine.step()``.

A step copies its gradients to fp32 and divides them by the loss scale, where DeepSpeed's own
clipping has its place (``unscale_and_clip_grads``). There shardclip's factor goes in, too: a bf16
gradient that is multiplied is rounded once more, 2e-3 off what the optimizer would have had.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Multiply = Callable[[Sequence[Tensor], float | Tensor], None]


def clip_in_step(engine: Any, clipper: Any, multiply: Multiply) -> "Factor | None":
    """Make ``engine.step()`` clip before it steps, at the accumulation boundary.

    A ``clip_()`` by hand after the same backward is not repeated. DeepSpeed's own clipping is
    switched off; ``engine.get_global_grad_norm()`` then gives shardclip's norm before clipping. A
    step that ``nonfinite="skip"`` skips changes no parameter and no optimizer state, drops the
    gradients, and counts in ``engine.skipped_steps``.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        clipper: Its ``GradClipper``.
        multiply: Scales tensors in place.

    Returns:
        What takes the clipper's factor; None where gradients are to be multiplied at once.
    """
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", None)  # None: the engine steps torch's own
    step = getattr(optimizer.step, "shardclip_replaced", optimizer.step)
    seen = clipper.steps
    factor = Factor(optimizer, multiply) if _has_stage(engine) else None
    _switch_off(engine)

    def clip_and_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if clipper.steps == seen:
            clipper.clip_()
        seen = clipper.steps
        _switch_off(engine)  # loading a checkpoint switches it on again
        result = clipper.result
        done = None
        if not result.skipped:
            done = step(*args, **kwargs)
        elif inner is not None:
            with _idle(inner):  # all of DeepSpeed's bookkeeping, but no update
                step(*args, **kwargs)
        optimizer.overflow = result.skipped or (inner is not None and optimizer.overflow)
        optimizer._global_grad_norm = result.total_norm
        if factor is not None:
            factor.settle(stepped=not optimizer.overflow)
        return done

    clip_and_step.shardclip_replaced = step  # type: ignore[attr-defined]
    optimizer.step = clip_and_step
    return factor


class Factor:
    """A step's clipping factor, until the optimizer's own stage for clipping takes it."""

    def __init__(self, optimizer: Any, multiply: Multiply) -> None:
        """Take the place of that stage, or of a clipper's that was there before."""
        self._optimizer = optimizer
        self._value: float | Tensor | None = None
        self._taken = False
        stage = optimizer.unscale_and_clip_grads
        stage = getattr(stage, "shardclip_replaced", stage)

        def unscale_and_clip(first: Any, *args: Any, **kwargs: Any) -> Any:
            done = stage(first, *args, **kwargs)  # with clip_grad at 0 it unscales alone
            self._taken = True
            if self._value is not None:
                multiply(_copies(optimizer, first), self._value)
            return done

        unscale_and_clip.shardclip_replaced = stage  # type: ignore[attr-defined]
        self._stage = optimizer.unscale_and_clip_grads = unscale_and_clip

    def put(self, value: float | Tensor) -> None:
        """Take the factor of the next step; the last one counts.

        Raises:
            RuntimeError: Another clipper has taken over the engine.
        """
        if self._optimizer.unscale_and_clip_grads is not self._stage:
            raise RuntimeError("another GradClipper clips this engine's gradients now; use that")
        self._value, self._taken = value, False

    def settle(self, *, stepped: bool) -> None:
        """Forget the factor once the step is through.

        Raises:
            RuntimeError: It was never asked for, so the step was made on unclipped gradients.
        """
        lost = stepped and self._value is not None and not self._taken
        self._value = None
        if lost:
            raise RuntimeError(
                f"{type(self._optimizer).__name__}.step() stepped without its stage for clipping, "
                "on unclipped gradients; shardclip does not know this version of DeepSpeed"
            )


def _has_stage(engine: Any) -> bool:
    """Whether the step has a stage that scales fp32 copies, with nothing between it and the update.

    BF16_Optimizer has none, its gradients are fp32; so are those that torch's own optimizers step
    on. Muon makes its updates of the gradients before that stage, and DeepSpeed's own fused kernels
    take the factor as an argument.
    """
    optimizer = engine.optimizer
    fused = any(getattr(optimizer, f"fused_{name}_legacy", False) for name in ("adam", "lamb"))
    muon = any(getattr(p, "use_muon", False) for p in engine.module.parameters())
    return hasattr(optimizer, "unscale_and_clip_grads") and not fused and not muon


def _copies(optimizer: Any, told: Any) -> list[Tensor]:
    """List the fp32 gradients that the stage scales, from its first argument."""
    if isinstance(told, int):  # stage 3: a sub-group
        return [optimizer.fp32_partitioned_groups_flat[told].grad]
    if isinstance(told, list):  # stages 1 and 2: tensors, or lists of them
        nested = [entry if isinstance(entry, list) else [entry] for entry in told]
        return [grad for entry in nested for grad in entry]
    held = [p.grad for group in optimizer.fp32_groups for p in group]  # stage 0
    return [grad for grad in held if grad is not None]


def _switch_off(engine: Any) -> None:
    """Switch DeepSpeed's own clipping off: ZeRO's, and stage 0's, which comes before the step."""
    engine._config.gradient_clipping = engine.optimizer.clip_grad = 0.0


@contextmanager
def _idle(optimizer: Any) -> Iterator[None]:
    """Make an optimizer's step do nothing."""
    replaced = vars(optimizer).get("step")
    optimizer.step = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del optimizer.step
        if replaced is not None:
            optimizer.step = replaced
