"""Loss scaling: what shardclip needs of ``torch.amp.GradScaler``, whose state is private.

A scaler keeps for each optimizer at what stage of the step it is, and on each device whether a
gradient was not finite. What is done here leaves that state as the scaler's own ``unscale_`` and
``step`` leave it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from shardclip import compat

from . import optimizers

_STAGES: Any = getattr(torch.amp.grad_scaler, "OptState", None)


def resolve(
    scaler: object, stepped: Sequence[Optimizer], norm_type: float = 2.0
) -> GradScaler | None:
    """Check a scaler and its optimizers before a step, alike on all ranks.

    Args:
        scaler: A ``torch.amp.GradScaler``, or one that shares its state, such as FSDP1's
            ``ShardedGradScaler``; or None.
        stepped: The optimizers whose gradients it has scaled.
        norm_type: The norm by which an overflow is to be seen.

    Returns:
        The scaler; None where there is none, or it is disabled and so leaves everything as it is.

    Raises:
        TypeError: It is no GradScaler.
        ValueError: There is no optimizer, or the norm counts an infinity like any number.
        RuntimeError: An optimizer has already stepped since the last ``update()``, only some have
            been unscaled, or this version of torch keeps its state in a way that is not known.
    """
    if scaler is None:
        return None
    if not isinstance(scaler, GradScaler):
        raise TypeError(
            f"grad_scaler is a {type(scaler).__name__}; give a torch.amp.GradScaler, or divide the "
            "gradients by the loss scale yourself before clipping"
        )
    if not scaler.is_enabled():
        return None
    if not stepped:
        raise ValueError("grad_scaler= needs the optimizers whose gradients it has scaled")
    if norm_type == 0:
        raise ValueError(
            "grad_scaler= sees an overflow by the norm, and norm_type=0 counts an infinity like "
            "any number; choose another norm_type, or call grad_scaler.unscale_(optimizer) before "
            "clipping and grad_scaler.step(optimizer) after"
        )
    stages = [_state(scaler, optimizer)["stage"] for optimizer in stepped]
    if _STAGES.STEPPED in stages:
        raise RuntimeError(
            "step() has already been called since the last update(). "
            "Call grad_scaler.update() at the end of each step"
        )
    if len(set(stages)) > 1:
        raise RuntimeError(
            "unscale_() has already been called on some of the optimizers and not on others, so "
            "their gradients have no common norm; call it on all of them or on none"
        )
    return scaler


def inverse_scale(scaler: GradScaler, stepped: Sequence[Optimizer], device: torch.device) -> Tensor:
    """Return what gradients must be multiplied by to undo the loss scale.

    Args:
        scaler: As ``resolve`` returns it.
        stepped: Its optimizers.
        device: Where the result goes; no host sync where the scale lies there too.

    Returns:
        0-dim float64; 1 where ``unscale_`` has already been called.

    Raises:
        RuntimeError: The scaler has no scale yet, which it makes on its first ``scale(loss)``. On
            one rank alone this happens where that rank computes no loss.
    """
    if _state(scaler, stepped[0])["stage"] is _STAGES.UNSCALED:
        return torch.ones((), dtype=torch.float64, device=device)
    return compat.to_device(_scale(scaler).double().reciprocal(), device)


def check_members(stepped: Sequence[Optimizer], named: Mapping[int, str]) -> None:
    """Check that each gradient of the clipper's is in one of the optimizers.

    Else it would be unscaled by nobody who tells the scaler. That the clipper knows each gradient
    of the optimizers' is for ``strays`` to check.

    Args:
        stepped: The optimizers.
        named: By ``id`` of the parameter, the names of those that have a gradient in the clipper.

    Raises:
        ValueError: Says which are not. Ranks may differ in this.
    """
    held = {id(p) for optimizer in stepped for p in optimizers.parameters_of(optimizer)}
    left = [name for key, name in named.items() if key not in held]
    if left:
        raise ValueError(
            f"{left[0]}: it has a gradient, but is in none of the optimizers (one of {len(left)} "
            "such), and so would not be unscaled by the scaler; give all the optimizers that the "
            "clipper's parameters are in, clip_(grad_scaler=..., optimizers=[...])"
        )


def mark_unscaled(scaler: GradScaler, optimizer: Optimizer, found_inf: Tensor) -> None:
    """Leave the scaler as its ``unscale_(optimizer)`` does, where that was done here.

    Then ``scaler.step(optimizer)`` does not unscale again, and skips the step where a gradient is
    not finite. Other than there, a rank without gradients records what was found, too, so that
    ``step`` and ``update`` do the same on all ranks.

    Args:
        scaler: As ``resolve`` returns it.
        optimizer: One of its optimizers.
        found_inf: 0-dim, of any dtype: not 0 where any rank's gradients are not finite. What an
            earlier ``unscale_`` has found is kept.

    Communication:
        None; no host sync where it lies on the gradients' device.
    """
    state = _state(scaler, optimizer)
    held: dict[torch.device, Tensor] = {}
    if state["stage"] is _STAGES.UNSCALED:
        held = state["found_inf_per_device"]
    grads = [p.grad for p in optimizers.parameters_of(optimizer)]
    devices = dict.fromkeys([*held, *(grad.device for grad in grads if grad is not None)])
    found = found_inf.detach().ne(0).float()
    if _is_sharded(scaler) and not getattr(optimizer, "_step_supports_amp_scaling", False):
        found = found.view(1)  # as it has it; but with this its own step of fused ones fails
    told = {d: compat.to_device(found, d) for d in devices or [_scale(scaler).device]}
    state["found_inf_per_device"] = {
        # All of them are new tensors: update() adds them up in place.
        device: torch.maximum(now, held[device]) if device in held else now
        for device, now in told.items()
    }
    state["stage"] = _STAGES.UNSCALED


def step_with_scaler(
    scaler: GradScaler, optimizer: Optimizer, found_inf: Tensor, coef: Tensor | None = None
) -> None:
    """Step as ``scaler.step(optimizer)`` does after ``unscale_`` and clipping.

    Args:
        scaler: As ``resolve`` returns it.
        optimizer: One of its optimizers.
        found_inf: As in ``mark_unscaled``.
        coef: What is still to be multiplied in, 0-dim float64: the inverse scale times the clipping
            coefficient, for an optimizer that ``optimizers.factor_group`` finds a group for. None:
            the gradients are unscaled and clipped already.

    Communication:
        None. With a coefficient no host sync, either; without one an optimizer that is not fused
        has the scaler's own.
    """
    mark_unscaled(scaler, optimizer, found_inf)
    if coef is None:
        with optimizers.unfused(optimizer, not optimizers.skips_safely(optimizer)):
            scaler.step(optimizer)
        return
    state = _state(scaler, optimizer)
    (found,) = state["found_inf_per_device"].values()
    optimizers.step_scaled(optimizer, coef, found.view(()))
    state["stage"] = _STAGES.STEPPED


def is_torchs(scaler: GradScaler) -> bool:
    """Whether the scaler's ``step`` is torch's own, so that ours may take its place."""
    return type(scaler).step is GradScaler.step


def _state(scaler: GradScaler, optimizer: Optimizer) -> dict[str, Any]:
    """Return the scaler's record of an optimizer; the one place that knows how it is kept."""
    try:
        state: dict[str, Any] = scaler._per_optimizer_states[id(optimizer)]
        known = state["stage"] in (_STAGES.READY, _STAGES.UNSCALED, _STAGES.STEPPED)
        known = known and isinstance(state["found_inf_per_device"], dict)
    except (AttributeError, KeyError, TypeError):
        known = False
    if not known:
        raise RuntimeError(
            f"torch {torch.__version__} keeps the state of {type(scaler).__name__} in a way that "
            "this version of shardclip does not know; leave grad_scaler= out, and call "
            "grad_scaler.unscale_(optimizer) before clipping and grad_scaler.step(optimizer) after"
        )
    return state


def _scale(scaler: GradScaler) -> Tensor:
    scale: Tensor | None = scaler._get_scale_async()
    if scale is None:
        raise RuntimeError(
            "Attempted unscale_ but the grad_scaler has no scale yet: scale(loss) was not called "
            "on it. On a rank that computes no loss call grad_scaler.scale(torch.zeros(())) once, "
            "on the device of the others' losses"
        )
    return scale


def _is_sharded(scaler: GradScaler) -> bool:
    """Whether it is FSDP1's, which records found_inf with one dim; found without importing it."""
    return any(cls.__name__ == "ShardedGradScaler" for cls in type(scaler).__mro__)
