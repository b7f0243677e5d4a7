"""What a tensor is, and where its values are: DTensors, flat parameters, plain ones."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

# What counts as a tensor without hidden structure; subclasses beyond these are refused by name.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

_classes: dict[str, type] = {}


def loaded(module: str, name: str) -> type | None:
    """Return a class without importing its module: no instance exists before that anyway."""
    found = _classes.get(name)
    if found is None:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None:
            _classes[name] = found
    return found


def is_dtensor(tensor: object) -> bool:
    """Whether this is a DTensor."""
    if type(tensor) in _PLAIN:
        return False
    cls = loaded("torch.distributed.tensor", "DTensor")
    return cls is not None and isinstance(tensor, cls)


def local_numel(tensor: Any) -> int:
    """Count this rank's own elements."""
    return int((tensor._local_tensor if is_dtensor(tensor) else tensor).numel())


def numbers_in(tensor: Tensor) -> int:
    """Count the real numbers of a tensor: a complex one has two each."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def real_view(tensor: Tensor) -> Tensor:
    """View a complex tensor as real numbers, two for each, in a last dim of its own."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def in_storage_order(tensor: Tensor) -> Tensor:
    """Permute the dims as the elements are stored: without gaps between them it is contiguous."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def is_strided(tensor: object) -> bool:
    """Whether a tensor is dense rather than sparse."""
    return getattr(tensor, "layout", torch.strided) == torch.strided


def is_plain(tensor: Tensor) -> bool:
    """Whether this is a tensor whose elements are just its own: no subclass with hidden meaning."""
    if type(tensor) in _PLAIN:
        return True
    kinds = (
        loaded("torch.nn.parameter", "Buffer"),
        loaded("torch.distributed.fsdp._flat_param", "FlatParameter"),
    )
    return any(cls is not None and type(tensor) is cls for cls in kinds)


def local_tensor(tensor: Any) -> Tensor:
    """Return this rank's own tensor: a DTensor's local part, an asynchronous result waited for."""
    if type(tensor) in _PLAIN:
        return cast("Tensor", tensor)
    local: Any = tensor._local_tensor if is_dtensor(tensor) else tensor
    pending = loaded("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if pending is not None and type(local) not in _PLAIN and isinstance(local, pending):
        wait = "trigger_wait" if hasattr(local, "trigger_wait") else "wait"
        local = getattr(local, wait)()
    return cast("Tensor", local)


def local_tensors(tensors: Sequence[Any]) -> list[Tensor]:
    """Do the same for many, quickly: this runs for every gradient in every step."""
    dtensor: Any = loaded("torch.distributed.tensor", "DTensor")
    found = [t._local_tensor if type(t) is dtensor else t for t in tensors]
    if _PLAIN.issuperset(map(type, found)):
        return found
    found = [local_tensor(tensor) for tensor in found]
    for local in found:
        if not is_plain(local):
            raise TypeError(f"gradients of type {type(local).__name__} are not understood")
    return found


def mesh_and_placements(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a DTensor's device mesh and placements."""
    return tensor.device_mesh, tensor.placements


def from_local(local: Tensor, like: Any) -> Tensor:
    """Wrap a local tensor in the mesh, placements and shape of the DTensor ``like``; no checks."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def global_offset(tensor: Any) -> tuple[int, ...]:
    """Tell where this rank's part of a DTensor begins in the whole, dim by dim."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = mesh_and_placements(tensor)
    return compute_local_shape_and_global_offset(tensor.shape, mesh, placements)[1]


def full_tensor(tensor: Any) -> Tensor:
    """Gather a DTensor, as torch's own norm is one; its mesh's ranks must all call."""
    return cast("Tensor", tensor.full_tensor())


def is_fsdp1_flattened(parameter: Tensor) -> bool:
    """Whether FSDP1 has taken this parameter into (or is it itself) a flat parameter."""
    return bool(getattr(parameter, "_fsdp_flattened", False)) or hasattr(
        parameter, "_shard_param_infos"
    )


def unsharded_by_fsdp(modules: Iterable[Any]) -> dict[int, int] | None:
    """Tell by ``id`` what FSDP2 puts into these modules for its passes, whole, for which shard.

    None where that cannot be told: modules inside one that is sharded, which is not among them.
    """
    cls: Any = loaded("torch.distributed.fsdp", "FSDPModule")
    if cls is None:
        return {}
    listed = list(modules)
    states = [module._get_fsdp_state() for module in listed if isinstance(module, cls)]
    if not states:
        inside = any(getattr(module, "_is_fsdp_managed_module", False) for module in listed)
        return None if inside else {}
    groups = [
        group
        for state in states  # one group in torch before 2.13
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        if group is not None
    ]
    held = [p for group in groups for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    return {id(p._unsharded_param): id(p.sharded_param) for p in held}
