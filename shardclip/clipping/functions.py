"""The public functions: torch's and TensorFlow's names, over any sharding, with one all-reduce."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardclip import compat
from shardclip.comm import Group, World, reduce
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
    trees,
    unique,
)
from shardclip.math import norm
from shardclip.notices import warn_once
from shardclip.plan import exactness
from shardclip.step import NO_GRADIENTS, Measured, measure_once, rounded, scale_

Parameters = nn.Module | Tensor | Iterable[Any]
"""A module, one tensor, or an iterable of tensors or ``(name, tensor)`` pairs."""

Tree = TypeVar("Tree")
"""A list of tensors, or a tree: lists, tuples and mappings, nested at will."""


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
    _check_all(sources, grads)
    coef = norm.clip_coef(_as_float64(total_norm), max_norm)
    targets = [adapters.storage(compat.local_tensor(grad)) for grad in grads if grad is not None]
    scale_(targets, float(coef) if coef.device.type == "cpu" else coef)


def clip_by_global_norm(
    t_list: Tree,
    clip_norm: float,
    use_norm: Tensor | float | None = None,
    name: str | None = None,
    *,
    group: Group = None,
    layout: Layout = None,
) -> tuple[Tree, Tensor]:
    """Clip a list or tree of tensors by their global norm, out of place, as TensorFlow does.

    ``t * clip_norm / max(global_norm, clip_norm)``, without an epsilon. Where the norm is not
    finite every element becomes NaN.

    Args:
        t_list: Tensors (plain, DTensor or sparse) or None, which stays None: in a list, or nested
            in lists, tuples and mappings, as optax has them.
        clip_norm: The largest global norm that is left alone.
        use_norm: A global norm that is known already; then nothing is summed.
        name: Accepted for TensorFlow's sake.
        group: As in ``clip_grad_norm_``.
        layout: As in ``get_total_norm``.

    Returns:
        The clipped tensors in the structure that was given, and the global norm, a 0-dim tensor
        (``use_norm`` if given).

    Raises:
        TypeError: ``t_list`` is one tensor or no sequence.
        ValueError, ReplicaMismatchError: As in ``get_total_norm``; or ``clip_norm`` is negative.

    Communication:
        One all-reduce, as in ``clip_grad_norm_``; none with ``use_norm`` (a DTensor is gathered).

    References:
        ``tf.clip_by_global_norm``; Pascanu et al., 2012, arXiv:1211.5063.
    """
    clip_norm = norm.check_max_norm(clip_norm, "clip_norm")
    listed, world = _listed(t_list), reduce.resolve(group)
    sources = [source for source in listed if source.parameter is not None]
    if use_norm is None:
        found = _measured_list(listed, world, layout, max_norm=clip_norm, limit="clip_norm")
        total, returned = found.total_norm, rounded(found)
    else:
        _check_all(sources, [source.parameter for source in sources])
        total = _as_float64(use_norm)
        returned = use_norm if isinstance(use_norm, Tensor) else total.float()
    coef = norm.tf_clip_coef(total, clip_norm)
    held = (source.parameter for source in listed)
    clipped = (None if tensor is None else _scaled(tensor, coef) for tensor in held)
    return trees.rebuilt(t_list, clipped), returned


def global_norm(
    t_list: Any, *, group: Group = None, layout: Layout = None, exact: bool = False
) -> Tensor:
    """Compute the L2 norm of all tensors of a list or tree; ``None`` entries are passed over.

    As in TensorFlow, a tensor that is listed twice counts twice. Copies on other ranks stand at the
    same place of their lists or trees.

    Args:
        t_list: As in ``clip_by_global_norm``.
        group: As in ``clip_grad_norm_``.
        layout: As in ``get_total_norm``.
        exact: As in ``get_total_norm``.

    Returns:
        A plain 0-dim tensor, as in ``get_total_norm``.

    Raises:
        TypeError, ValueError, ReplicaMismatchError: As in ``clip_by_global_norm``.

    Communication:
        One all-reduce, as in ``clip_grad_norm_``.

    References:
        ``tf.linalg.global_norm``, ``optax.global_norm``.
    """
    world = reduce.resolve(group)
    if exact:
        exactness.check(2.0, world)
    return rounded(_measured_list(_listed(t_list), world, layout, exact=exact))


def _measured_list(listed: Sequence[Source], world: World, layout: Layout, **how: Any) -> Measured:
    """Measure a list's tensors; their places in it tell which are copies of which."""
    places = [place for place, source in enumerate(listed) if source.parameter is not None]
    sources = [listed[place] for place in places]
    values = [source.parameter for source in sources]
    return measure_once(sources, values, 2.0, world, layout, numbers=places, **how)[0]


def _as_float64(known: Tensor | float) -> Tensor:
    if not isinstance(known, Tensor):
        return compat.on_host(float(known))
    return (compat.full_tensor(known) if compat.is_dtensor(known) else known).detach().double()


def _check_all(sources: Sequence[Source], grads: Sequence[Tensor | None]) -> None:
    """Refuse what cannot be scaled before anything is: nothing may be half done."""
    for source, grad in zip(sources, grads, strict=True):
        if grad is not None:
            adapters.check_named(source.name, grad)


def _listed(t_list: Any) -> list[Source]:
    """List a tree's leaves, None among them."""
    trees.check(t_list, "t_list")
    return [Source(name, leaf) for name, leaf in trees.leaves(t_list, "t_list")]


@torch.no_grad()
def _scaled(tensor: Tensor, coef: Tensor) -> Tensor:
    """Multiply out of place, in the tensor's own dtype."""
    local = compat.local_tensor(tensor)
    scaled = local.clone()
    storage = adapters.storage(scaled)
    scale_([storage], float(coef) if coef.device.type == "cpu" else coef)
    return compat.from_local(scaled, tensor) if compat.is_dtensor(tensor) else scaled
