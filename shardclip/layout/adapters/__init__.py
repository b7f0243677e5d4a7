"""From a framework's tensors to this rank's local tensor, and who owns what of it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardclip import compat
from shardclip.comm import World
from shardclip.layout.ownership import Place
from shardclip.layout.sources import Layout, Source, clean, of_iterable, unique

from . import dtensor, fsdp1

_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
    }
)
"""What can be summed and scaled; the 8-bit types cannot."""

SHARED = "its elements share memory (an expanded tensor); give a .contiguous() one"


def _unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DataParallel and DistributedDataParallel."""
    while isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        module = module.module
    return module


def module_sources(module: nn.Module, world: World) -> list[Source]:
    """List a module's parameters, FSDP1's flat ones by the parameters inside."""
    module = _unwrap(module)
    sources = fsdp1.sources(module, world)
    taken = {id(source.parameter) for source in sources}
    for name, parameter in module.named_parameters():
        if id(parameter) not in taken:
            sources.append(Source.named(clean(name), parameter))
    return unique(sources)


def sources_of(
    parameters: nn.Module | Tensor | Iterable[Any], world: World, unnamed: str = "parameters[{}]"
) -> list[Source]:
    """List what a module, one tensor or an iterable holds, each parameter once."""
    if isinstance(parameters, nn.Module):
        return module_sources(parameters, world)
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    return unique(of_iterable(listed, unnamed))


def check(tensor: object, gradient: bool = True) -> None:
    """Refuse a gradient that has no norm (else only what is no tensor); looks at metadata alone.

    Raises:
        TypeError: It is no tensor, or a subclass whose meaning is not known.
        ValueError: It is on the meta device, of a dtype that has no norm or cannot be scaled, of
            overlapping memory, or still to be reduced.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"is a {type(tensor).__name__}; give tensors or (name, tensor) pairs")
    if not gradient:
        return
    local = compat.local_tensor(tensor)
    if not compat.is_plain(local):
        raise TypeError(
            f"gradients of type {type(local).__name__} are not understood; "
            "convert it to a plain tensor or a DTensor"
        )
    if local.device.type == "meta":
        raise ValueError("it is on the meta device and has no values; materialize it first")
    if local.dtype not in _DTYPES:
        raise ValueError(f"it has dtype {local.dtype}, which has no norm; give floating point")
    if compat.shares_memory(local):
        raise ValueError(SHARED)
    if compat.is_dtensor(tensor):
        dtensor.refuse_partial(*compat.mesh_and_placements(tensor))


def check_named(name: str, tensor: object, gradient: bool = True) -> None:
    """Check as ``check`` does, and say whose gradient it is.

    Raises:
        TypeError, ValueError: As ``check``.
    """
    try:
        check(tensor, gradient)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def place(source: Source, tensor: Tensor, layout: Layout, rank: int) -> tuple[Place | None, bool]:
    """Find where this rank's piece lies.

    Returns:
        The place, or None for a plain tensor without a layout; and whether a layout said so.

    Raises:
        ValueError: The layout is wrong, or failed.
    """
    declared = _declared(source, tensor, layout)
    if declared is not None:
        mesh, placements = dtensor.check_layout(declared)
        return dtensor.place(mesh, placements, rank), True
    if compat.is_dtensor(tensor):
        return dtensor.place(*compat.mesh_and_placements(tensor), rank), False
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
        return layout(source.parameter)
    return None if compat.is_dtensor(tensor) else layout


def global_index(source: Source, grad: Any, index: int) -> tuple[int, ...]:
    """Find an element of a local gradient in the whole one.

    Args:
        source: Whose gradient.
        grad: The gradient; of a plain one whose place is not known its own index is given.
        index: Of the element among the local values, flat, in logical order.
    """
    if source.begins is not None:
        start, shape = source.begins
        return _unflat(start + index, shape)
    local = compat.local_tensor(grad)
    if local.layout == torch.sparse_coo:
        local = local.coalesce()
        row, *rest = _unflat(index, local.values().shape)
        return (*local.indices()[:, row].tolist(), *rest)
    if local.layout != torch.strided:
        return (index,)
    places = _unflat(index, local.shape)
    if not compat.is_dtensor(grad):
        return places
    return tuple(map(sum, zip(places, compat.global_offset(grad), strict=True)))


def _unflat(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Turn a flat index into one for each dim."""
    out = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        out.append(place)
    return tuple(reversed(out))


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


__all__ = [
    "SHARED",
    "Read",
    "check",
    "check_named",
    "global_index",
    "module_sources",
    "place",
    "read_grad",
    "sources_of",
    "storage",
    "values",
]
