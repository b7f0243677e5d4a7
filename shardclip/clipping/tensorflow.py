"""The public functions with TensorFlow's names: out of place, over any sharding."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardclip import compat
from shardclip.comm import Group, World, reduce
from shardclip.layout import Layout, Source, adapters, trees
from shardclip.math import norm
from shardclip.plan import exactness
from shardclip.step import Measured, measure_once, rounded, scale_

from .functions import as_float64, check_all

Tree = TypeVar("Tree")
"""A list of tensors, or a tree: lists, tuples and mappings, nested at will."""


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
        check_all(sources, [source.parameter for source in sources])
        total = as_float64(use_norm)
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
