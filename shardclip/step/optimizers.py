"""The clipping factor inside a fused optimizer's own step, so that no pass over gradients is made.

torch's fused kernels divide each gradient by ``optimizer.grad_scale`` as they read it, and do
nothing where ``optimizer.found_inf`` is 1: the contract that ``torch.amp.GradScaler`` made.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from shardclip import compat

from .scale import scale_

_FUSED = (Adam, AdamW, SGD, Adagrad)
_NO_DTENSOR_RULE = (SGD, Adagrad)
"""torch 2.13 cannot run their fused kernels on DTensors."""

# The kernels take the factor as a float32, which is too coarse for float64 gradients.
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

# Below this 1 / coef is no float32 any more.
_SMALLEST = 2.0**-126


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """List the parameters of all its groups."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def factor_group(optimizer: Optimizer, group_of: Mapping[int, int]) -> int | None:
    """Find the param group whose coefficient may go into the optimizer's own step.

    It may where all of this holds, and nothing of it is read from a device:

    - The optimizer is torch's Adam, AdamW, SGD or Adagrad itself, with ``fused=True`` in every
      param group: torch asserts that the others are given no factor, even those without gradients.
    - Nothing else looks at ``.grad`` before the kernel does: no step pre-hooks, its own or global,
      and no ``step`` that is replaced or wrapped, except by torch's learning rate schedulers.
    - All its gradients are of one group of the clipper's, on one device, dense and real, of at most
      32 bits; for SGD and Adagrad no DTensors.
    - SGD with momentum has its buffers, that is, after its first step: the kernel that
      ``found_inf`` stops on the first one would leave memory as it came for a buffer.

    Args:
        optimizer: Any optimizer.
        group_of: By ``id`` of the parameter, the clipper's group of its gradient; without those
            whose gradient is not ``.grad`` or is of several groups.

    Returns:
        The group; None where the gradients must be scaled before the step, or there are none.
    """
    if type(optimizer) not in _FUSED or is_watched(optimizer):
        return None
    if not all(group["fused"] for group in optimizer.param_groups):
        return None
    seen = {  # one gradient of each kind: this runs for every parameter in every step
        (group_of.get(id(p)), grad.device, grad.dtype, type(grad), grad.layout): grad
        for p in parameters_of(optimizer)
        if (grad := p.grad) is not None
    }
    if len({kind[:2] for kind in seen}) != 1 or not all(map(_is_ordinary, seen.values())):
        return None
    if _has_no_rule(optimizer) or _lacks_momentum(optimizer):
        return None
    return next(iter(seen))[0]


def factor_groups(
    stepped: Sequence[Optimizer], group_of: Mapping[int, int]
) -> dict[int, int | None]:
    """Find them for optimizers that step one after the other, by ``id`` of the optimizer.

    A parameter that two of them hold would be scaled by both: then none takes the factor.
    """
    held = [id(p) for one in stepped for p in parameters_of(one)]
    if len(set(held)) < len(held):
        return dict.fromkeys(map(id, stepped))
    return {id(one): factor_group(one, group_of) for one in stepped}


def step_scaled(optimizer: Optimizer, coef: Tensor, found_inf: Tensor | None = None) -> None:
    """Step as on gradients that were multiplied by a coefficient, with no pass over them before.

    Afterwards ``.grad`` holds the scaled gradients. The kernel divides by ``1 / coef``, rounded to
    float32, in float32: each element that it works with is within 2 roundings, 2**-23 of its size,
    of the exact product, and within 4, 2**-22, of what scaling before the step gives in float32.
    16-bit gradients are rounded to their own dtype only in ``.grad``, the step itself takes them
    unrounded. With a coefficient of 1 all bits are those of ``optimizer.step()``.

    Args:
        optimizer: One that ``factor_group`` finds a group for.
        coef: 0-dim float64, at least 0; on any device. 0 gives zeros (and NaN for an infinity), NaN
            gives NaN, as multiplication does. On an accelerator what is below 2**-128 acts as 0;
            that takes a norm of more than 3e38 times ``max_norm``.
        found_inf: 0-dim, of any dtype: where it is not 0, gradients, parameters and the optimizer's
            state stay as they are. None: the step is made in any case.

    Raises:
        Whatever the step raises. ``grad_scale`` and ``found_inf`` are put back as they were.

    Communication:
        None, and no host sync where the coefficient lies on the gradients' device. A ``grad_scale``
        that the optimizer had before still counts: the factors are multiplied.

    References:
        ``torch.amp.GradScaler.step`` and ``torch.optim.adam._fused_adam``.
    """
    held = _with_gradients(optimizer)
    device = compat.local_tensor(held[0].grad).device if held else coef.device
    coef = compat.to_device(coef.detach(), device)
    scale, stops = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if found_inf is not None:
        found = compat.to_device(found_inf.detach(), device).ne(0).float()
        stops = found if stops is None else torch.maximum(found, stops.to(device))
    on_host = device.type == "cpu"  # then reading is free
    if on_host:
        coef = _applied_on_host(held, coef, stops)
    if not (on_host and float(coef) == 1):
        scale = (coef.reciprocal() if scale is None else scale.to(device) / coef).float()
    with _attributes(optimizer, grad_scale=scale, found_inf=stops):
        optimizer.step()


def step_plain(optimizer: Optimizer) -> None:
    """Step on gradients as they are, also where torch's fused kernel cannot.

    SGD and Adagrad with ``fused=True`` have no rule for DTensors in torch 2.13; they step
    without their fused kernel.
    """
    with unfused(optimizer, _has_no_rule(optimizer)):
        optimizer.step()


def skips_safely(optimizer: Optimizer) -> bool:
    """Whether the optimizer's fused kernel, if it has one, may be given ``found_inf``."""
    return not (_has_no_rule(optimizer) or _lacks_momentum(optimizer))


@contextmanager
def unfused(optimizer: Optimizer, applies: bool = True) -> Iterator[None]:
    """Let an optimizer step without its fused kernel, and look like one that has none."""
    groups = [group for group in optimizer.param_groups if applies and group.get("fused")]
    if not groups:
        yield
        return
    for group in groups:
        group["fused"] = False
    try:
        with _attributes(optimizer, _step_supports_amp_scaling=False):
            yield
    finally:
        for group in groups:
            group["fused"] = True


def _with_gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p for p in parameters_of(optimizer) if p.grad is not None]


def _is_ordinary(grad: Tensor) -> bool:
    local = compat.local_tensor(grad)
    return compat.is_plain(local) and compat.is_strided(local) and local.dtype in _DTYPES


def is_watched(optimizer: Optimizer) -> bool:
    """Whether code other than torch's own runs in a step, before its kernel does."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", True)
    shared = getattr(sys.modules[Optimizer.__module__], "_global_optimizer_pre_hooks", True)
    if own or shared:
        return True
    layer = getattr(optimizer.step, "__func__", optimizer.step)
    while layer is not None:  # a wrapper copies the name of what it wraps, but not its globals
        module = getattr(layer, "__globals__", {}).get("__name__", "")
        if not module.startswith("torch.optim."):
            return True
        layer = getattr(layer, "__wrapped__", None)
    return False


def _has_no_rule(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, _NO_DTENSOR_RULE) and any(
        map(compat.is_dtensor, parameters_of(optimizer))
    )


def _lacks_momentum(optimizer: Optimizer) -> bool:
    """Whether SGD's fused kernel is about to make a momentum buffer."""
    return isinstance(optimizer, SGD) and any(
        p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["fused"] and group["momentum"] != 0
        for p in group["params"]
    )


def _applied_on_host(held: list[Tensor], coef: Tensor, stops: Tensor | None) -> Tensor:
    """Apply a coefficient that has no float32 reciprocal here; return what is left of it."""
    if stops is not None and bool(stops):
        return torch.ones_like(coef)
    if 0 < float(coef) < _SMALLEST:
        scale_(compat.local_tensors([p.grad for p in held]), float(coef))
        return torch.ones_like(coef)
    return coef


_ABSENT = object()


@contextmanager
def _attributes(optimizer: Optimizer, **given: object) -> Iterator[None]:
    """Set attributes, and put them back as they were: absent, None or a value."""
    before = {name: vars(optimizer).get(name, _ABSENT) for name in given}
    try:
        for name, value in given.items():
            setattr(optimizer, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(optimizer, name)
            else:
                setattr(optimizer, name, value)
