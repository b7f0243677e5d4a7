"""From a framework's tensors to this rank's local tensor, and who owns what of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..gradients import Layout, Source
from ..ownership import Ownership, Place
from . import dtensor


def check(tensor: Tensor) -> None:
    """Refuse a gradient that has no norm; looks at metadata alone.

    Raises:
        TypeError: It is no tensor, or a subclass whose meaning is not known.
        ValueError: It is on the meta device, of an integer dtype, or still to be reduced.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"is a {type(tensor).__name__}; give tensors or (name, tensor) pairs")
    local = compat.local_tensor(tensor)
    if not compat.is_plain(local):
        raise TypeError(
            f"gradients of type {type(local).__name__} are not understood; "
            "convert it to a plain tensor or a DTensor"
        )
    if local.device.type == "meta":
        raise ValueError("it is on the meta device and has no values; materialize it first")
    if not (local.is_floating_point() or local.is_complex()):
        raise ValueError(f"it has dtype {local.dtype}, which has no norm; give floating point")
    if compat.is_dtensor(tensor):
        dtensor.refuse_partial(tensor.device_mesh, tensor.placements)


def place(source: Source, tensor: Tensor, layout: Layout, rank: int) -> tuple[Place | None, bool]:
    """Find where this rank's piece lies.

    Returns:
        The place, or None for a plain tensor without a layout; and whether a layout said so.

    Raises:
        ValueError: The layout is wrong, or failed.
    """
    declared = _declared(source, tensor, layout)
    if declared is not None:
        return dtensor.place(*declared, rank), True
    if compat.is_dtensor(tensor):
        return dtensor.place(tensor.device_mesh, tensor.placements, rank), False
    if compat.is_fsdp1_flattened(source.parameter):
        raise ValueError(
            "it belongs to an FSDP1 module, and its gradient alone does not tell which part of it "
            "this rank holds; pass the module instead of its parameters"
        )
    return None, False


def _declared(source: Source, tensor: Tensor, layout: Layout) -> Any:
    if layout is None:
        return None
    if callable(layout):
        declared = layout(source.parameter)
    else:
        declared = None if compat.is_dtensor(tensor) else layout
    if declared is not None:
        return dtensor.check_layout(declared)
    return None


Read = Callable[[Tensor], Tensor | None]


def read_grad(parameter: Tensor) -> Tensor | None:
    """Read ``.grad``, where torch keeps gradients."""
    return parameter.grad


def values(local: Tensor) -> Tensor:
    """Return what is summed of a local tensor: a sparse one's values, duplicates added up."""
    if local.layout == torch.sparse_coo:
        return local.coalesce().values()
    if local.layout != torch.strided:
        return local.values()
    return local


def storage(local: Tensor) -> Tensor:
    """Return what is multiplied in place: of a sparse tensor its values as they are."""
    if local.layout == torch.sparse_coo:
        return local._values()
    return values(local)


__all__ = ["Ownership", "check", "place", "read_grad", "storage", "values"]
