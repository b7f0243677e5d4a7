"""The public functions: torch's names, over any sharding, with one all-reduce."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from shardclip import compat
from shardclip.comm import Group, reduce
from shardclip.errors import problem
from shardclip.layout import (
    Layout,
    Source,
    adapters,
    gradient,
    may_have_gradient,
    notice_if_used_up,
    of_iterable,
    refuse_gradients,
    unique,
)
from shardclip.math import norm
from shardclip.notices import warn_once
from shardclip.plan import exactness
from shardclip.step import NO_GRADIENTS, measure_once, rounded, scale_

Parameters = nn.Module | Tensor | Iterable[Any]
"""A module, one tensor, or an iterable of tensors or ``(name, tensor)`` pairs."""


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: Group = None,
    layout: Layout = None,
) -> Tensor:
    """Clip gradients in place by the norm of all gradients on all ranks, seen as one vector.

    ``grad *= min(1, max_norm / (total_norm + 1e-6))``. Two ranks with shards [3] and [4] and
    ``max_norm=1``: both get 5 and keep [0.6] and [0.8].

    Args:
        parameters: A module (FSDP1's must be given so), an iterable of tensors or of ``(name,
            tensor)`` pairs, or one tensor. Gradients may be plain, DTensor or sparse, of any
            floating-point or complex dtype and any device, or None.
        max_norm: The largest norm that is left alone; inf measures without clipping.
        norm_type: 0 (counts non-zeros), any p > 0, or inf.
        error_if_nonfinite: Raise where the norm is NaN or infinite, on every rank.
        foreach: Accepted for torch's sake; the result does not depend on it.
        group: The ranks that reduce together: a process group, a one-axis DeviceMesh, ``SELF`` for
            this rank alone, or None for the whole world. Every rank of it must call.
        layout: How plain tensors lie: ``(DeviceMesh, placements)``, or a callable from the
            parameter to that or to None. Without it plain tensors are copies on every rank.

    Returns:
        The norm before clipping: a plain 0-dim tensor on the gradients' device, float32, or float64
        where this rank has float64 gradients; rounded from one float64 value that has the same
        bits on every rank.

    Raises:
        ValueError: ``max_norm`` or ``norm_type`` is wrong; or, on every rank alike, they differ
            between ranks, a gradient is Partial, on meta or of integer dtype, or the layout is
            wrong: names parameter and rank; or, inside torch's ``join()``, a parameter is none that
            a DistributedDataParallel of it averages.
        TypeError: On every rank alike, a tensor subclass whose meaning is not known; or gradients
            were given in place of parameters: nothing on this rank has a ``.grad`` or could.
        NonFiniteGradientError: On every rank alike, with ``error_if_nonfinite``.
        ReplicaMismatchError: On every rank alike: gradients that should be copies are none.
        Whatever is raised, no gradient was touched.

    Communication:
        One all-reduce of 5128 float64 numbers. Host syncs on CUDA: none, or one where copies are
        to be proved that no ``layout`` vouches for, or with ``error_if_nonfinite``. Where some
        rank does not read the result in the same call, what is wrong leaves the gradients as they
        are, makes the norm NaN, and is raised by all ranks in the next call.
        None inside torch's ``join()``, where ranks may have run out of data: each of the others has
        the averaged gradients whole and measures alone; copies are not proved there.

    References:
        ``torch.nn.utils.clip_grad_norm_``.
    """
    max_norm = norm.check_max_norm(max_norm)
    p = norm.check_norm_type(norm_type)
    world = reduce.resolve(group)
    sources = adapters.sources_of(parameters, world)
    grads = [gradient(source, adapters.read_grad) for source in sources]
    try:
        wrong = []
        refuse_gradients(sources, grads)
    except TypeError as error:  # on this rank; all of them raise
        wrong = [problem("clip_grad_norm_", error)]
    found, coef = measure_once(
        sources,
        grads,
        p,
        world,
        layout,
        strict=error_if_nonfinite,
        max_norm=max_norm,
        problems=wrong,
    )
    notice_if_used_up(parameters, sources)
    if isinstance(coef, float) and found.flags.present == 0:
        warn_once(sources[0].parameter if sources else parameters, NO_GRADIENTS)
    if not (isinstance(coef, float) and coef == 1):
        scale_(found.targets(0), coef)
    return rounded(found)


def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: Group = None,
    layout: Layout = None,
    exact: bool = False,
) -> Tensor:
    """Compute the true global norm of tensors: gradients, parameters, updates.

    Two ranks with shards [3] and [4]: 5 on both. A tensor listed twice counts once.

    Args:
        tensors: An iterable of tensors, or one: plain, DTensor or sparse.
        norm_type: 0 (counts non-zeros), any p > 0, or inf.
        error_if_nonfinite: Raise where the norm is NaN or infinite, on every rank.
        foreach: Accepted for torch's sake; the result does not depend on it.
        group: As in ``clip_grad_norm_``.
        layout: As in ``clip_grad_norm_``; a callable is given the tensor.
        exact: Sum exactly and round once: the same bits on any number of ranks, for any split,
            order and device. For p = 1 and 2. Every rank must say the same: what travels differs.

    Returns:
        A plain 0-dim tensor, as in ``clip_grad_norm_``; float64 with ``exact``.

    Raises:
        ValueError, TypeError, NonFiniteGradientError, ReplicaMismatchError: As in
            ``clip_grad_norm_``.

    Communication:
        One all-reduce, as in ``clip_grad_norm_``.

    References:
        ``torch.nn.utils.get_total_norm``.
    """
    p = norm.check_norm_type(norm_type)
    world = reduce.resolve(group)
    if exact:
        exactness.check(p, world)
    listed = [tensors] if isinstance(tensors, Tensor) else tensors
    sources = unique(of_iterable(listed, "tensors[{}]"))
    values = [source.parameter for source in sources]
    found, _ = measure_once(
        sources, values, p, world, layout, strict=error_if_nonfinite, exact=exact
    )
    notice_if_used_up(tensors, sources)
    return rounded(found)


def clip_grads_with_norm_(
    parameters: Parameters,
    max_norm: float,
    total_norm: Tensor | float,
    foreach: bool | None = None,
) -> None:
    """Scale gradients in place by ``min(1, max_norm / (total_norm + 1e-6))``.

    Args:
        parameters: As in ``clip_grad_norm_``: what holds the gradients, not the gradients.
        max_norm: The largest norm that is left alone.
        total_norm: The norm, already known: a 0-dim tensor or a number.
        foreach: Accepted for torch's sake; the result does not depend on it.

    Raises:
        ValueError: ``max_norm`` is negative or NaN, or a gradient cannot be scaled.
        TypeError: Gradients were given where parameters are wanted.

    Communication:
        None, unless ``total_norm`` is a DTensor, as torch's own is: that is gathered. No host sync
        on CUDA.

    References:
        ``torch.nn.utils.clip_grads_with_norm_``.
    """
    max_norm = norm.check_max_norm(max_norm)
    sources = adapters.sources_of(parameters, reduce.resolve(reduce.SELF))
    grads = [gradient(source, adapters.read_grad) for source in sources]
    held = [source.parameter for source in sources]
    if held and not any(isinstance(g, Tensor) for g in grads):
        for source in sources:
            if not may_have_gradient(source.parameter):
                raise TypeError(
                    f"{source.name} is no parameter and has no .grad; clip_grads_with_norm_ wants "
                    "the parameters, and scales their .grad"
                )
    check_all(sources, grads)
    coef = norm.clip_coef(as_float64(total_norm), max_norm)
    targets = [adapters.storage(compat.local_tensor(grad)) for grad in grads if grad is not None]
    scale_(targets, float(coef) if coef.device.type == "cpu" else coef)


def as_float64(known: Tensor | float) -> Tensor:
    """Return a norm that the caller knows as a plain tensor; a DTensor is gathered."""
    if not isinstance(known, Tensor):
        return compat.on_host(float(known))
    return (compat.full_tensor(known) if compat.is_dtensor(known) else known).detach().double()


def check_all(sources: Sequence[Source], grads: Sequence[Tensor | None]) -> None:
    """Refuse what cannot be scaled before anything is: nothing may be half done."""
    for source, grad in zip(sources, grads, strict=True):
        if grad is not None:
            adapters.check_named(source.name, grad)
