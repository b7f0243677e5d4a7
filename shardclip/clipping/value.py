"""Value clipping: each element by itself, so that sharding does not matter."""

import math

import torch
from torch import Tensor

from shardclip import compat
from shardclip.comm import reduce
from shardclip.layout import Source, adapters, gradient, refuse_gradients
from shardclip.math import norm

from .functions import Parameters


@torch.no_grad()
def clip_grad_value_(
    parameters: Parameters, clip_value: float, foreach: bool | None = None
) -> None:
    """Clip every element of the gradients to ``[-clip_value, clip_value]``, in place.

    Each rank clips what it holds. Two ranks with shards [3] and [-4] and ``clip_value=2`` keep [2]
    and [-2]. A NaN stays NaN.

    Args:
        parameters: As in ``clip_grad_norm_``. Of a sparse gradient the sums of duplicates count:
            one with duplicates is coalesced, and put in the old one's place.
        clip_value: The largest magnitude that is left alone.
        foreach: Whether to use torch's foreach functions; by default they are used.

    Raises:
        ValueError: ``clip_value`` is negative or NaN, or a gradient is complex, Partial, on meta or
            of integer dtype: names the parameter. Nothing was touched. As nothing communicates,
            only ranks that hold such a gradient raise.
        TypeError: A tensor subclass whose meaning is not known; or gradients were given in place of
            parameters.

    Communication:
        None, and no host sync.

    References:
        ``torch.nn.utils.clip_grad_value_``, ``optax.clip``.
    """
    limit = norm.check_max_norm(clip_value, "clip_value")
    sources = adapters.sources_of(parameters, reduce.resolve(reduce.SELF))
    grads = [gradient(source, adapters.read_grad) for source in sources]
    for source, grad in zip(sources, grads, strict=True):
        _check(source, grad)
    refuse_gradients(sources, grads)
    if math.isinf(limit):
        return
    held = []
    for source, grad in zip(sources, grads, strict=True):
        if grad is not None and grad.layout == torch.sparse_coo and not grad.is_coalesced():
            source.parameter.grad = grad.coalesce()
            held.append(adapters.storage(source.parameter.grad))
        elif grad is not None:
            held.append(adapters.storage(compat.local_tensor(grad)))
    _clamp_(held, limit, foreach is not False)


def _check(source: Source, grad: Tensor | None) -> None:
    """Refuse what cannot be clipped before anything is."""
    held = grad is not None
    adapters.check_named(source.name, grad if held else source.parameter, gradient=held)
    if grad is not None and grad.is_complex():
        raise ValueError(f"{source.name}: it is complex, and complex numbers have no order")


def _clamp_(tensors: list[Tensor], limit: float, foreach: bool) -> None:
    if not foreach:
        for tensor in tensors:
            tensor.clamp_(-limit, limit)
        return
    kinds = dict.fromkeys((tensor.device, tensor.dtype) for tensor in tensors)
    for kind in kinds:
        here = [tensor for tensor in tensors if (tensor.device, tensor.dtype) == kind]
        torch._foreach_clamp_min_(here, -limit)
        torch._foreach_clamp_max_(here, limit)
