"""Everything of torch that is private, or new in a version, behind one guarded place."""

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

# What counts as a tensor without hidden structure; subclasses beyond these are refused by name.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


_classes: dict[str, type] = {}


def _loaded(module: str, name: str) -> type | None:
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
    cls = _loaded("torch.distributed.tensor", "DTensor")
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
        _loaded("torch.nn.parameter", "Buffer"),
        _loaded("torch.distributed.fsdp._flat_param", "FlatParameter"),
    )
    return any(cls is not None and type(tensor) is cls for cls in kinds)


def local_tensor(tensor: Any) -> Tensor:
    """Return this rank's own tensor: a DTensor's local part, an asynchronous result waited for."""
    if type(tensor) in _PLAIN:
        return cast("Tensor", tensor)
    local: Any = tensor._local_tensor if is_dtensor(tensor) else tensor
    pending = _loaded("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if pending is not None and type(local) not in _PLAIN and isinstance(local, pending):
        wait = "trigger_wait" if hasattr(local, "trigger_wait") else "wait"
        local = getattr(local, wait)()
    return cast("Tensor", local)


def local_tensors(tensors: Sequence[Any]) -> list[Tensor]:
    """Do the same for many, quickly: this runs for every gradient in every step."""
    dtensor: Any = _loaded("torch.distributed.tensor", "DTensor")
    found = [t._local_tensor if type(t) is dtensor else t for t in tensors]
    if _PLAIN.issuperset(map(type, found)):
        return found
    found = [local_tensor(tensor) for tensor in found]
    for local in found:
        if not is_plain(local):
            raise TypeError(f"gradients of type {type(local).__name__} are not understood")
    return found


def shares_memory(tensor: Tensor) -> bool:
    """Whether some of its elements are one number in memory, as an expanded tensor's are."""
    if not is_strided(tensor):
        return False
    return any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True))


def first_sharing_memory(tensors: Sequence[Tensor], dense: bool) -> int | None:
    """Find one whose elements share memory; quickly, as this runs for every gradient in every step.

    Args:
        tensors: Local ones.
        dense: None of them is sparse.
    """
    if dense and all(map(torch.Tensor.is_contiguous, tensors)):
        return None
    if dense and 0 not in chain.from_iterable(map(torch.Tensor.stride, tensors)):
        return None
    return next((i for i, tensor in enumerate(tensors) if shares_memory(tensor)), None)


def storage_address(tensor: Tensor) -> int:
    """Return where a tensor's storage begins, to compare: nobody will write there."""
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return address


def mark(tensor: Tensor) -> bool:
    """Mark a tensor's memory as copy-on-write, and say whether it is; see ``watch``."""
    try:
        torch._lazy_clone(tensor)
        return is_marked(tensor)
    except (AttributeError, RuntimeError):  # not in this torch, or not for this memory
        return False


def is_marked(tensor: Tensor) -> bool:
    """Whether a tensor's memory is marked as copy-on-write."""
    return bool(torch._C._is_cow_tensor(tensor))  # type: ignore[attr-defined]


def unmark(tensor: Tensor) -> None:
    """Take the mark off, as every write does: ask for an address that may be written to."""
    tensor.data_ptr()


def mesh_and_placements(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a DTensor's device mesh and placements."""
    return tensor.device_mesh, tensor.placements


def on_host(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Make a small tensor on the host, whatever torch's default device and dtype are."""
    return torch.tensor(values, dtype=dtype, device="cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor without a host sync, unless it goes to the host: then it must wait."""
    if tensor.device == device:
        return tensor
    if device.type == "cpu":
        return tensor.to(device)
    pinned = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


@lru_cache(maxsize=256)
def constant(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a small tensor that is the same in most steps; never write into it.

    Kept on its device: a step then copies nothing there, and can be captured in a CUDA graph.
    """
    return to_device(on_host(values, dtype), device)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, so that nothing can be read in this call."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class HostCopy:
    """A small tensor on its way to the host; on an accelerator nobody waits for it yet."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        if is_capturing():  # nobody will read it
            return
        self._host = tensor.to("cpu", non_blocking=True)
        if tensor.device.type != "cpu":
            self._event = torch.Event(tensor.device)
            # Not the current device's stream, which is another one's without set_device().
            self._event.record(torch.accelerator.current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """Ask without waiting; for what is this rank's alone, such as a log."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """Wait until it has arrived; never poll, so that all ranks do the same."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def signature(tensor: Any) -> object:
    """Return what a plan depends on; None for None.

    A DTensor's spec is mostly the same object every step, which makes the comparison cheap.
    """
    if is_dtensor(tensor):
        return tensor._spec
    if not isinstance(tensor, Tensor):
        return tensor
    if tensor.layout != torch.strided:
        return object()  # how many values a sparse gradient has changes from step to step
    return type(tensor), tensor.shape, tensor.dtype, tensor.device


def signatures(tensors: Sequence[Any]) -> list[object]:
    """Do the same for many, quickly."""
    dtensor: Any = _loaded("torch.distributed.tensor", "DTensor")
    return [
        (Tensor, t.shape, t.dtype, t.device)
        if type(t) is Tensor and t.layout is torch.strided
        else t._spec
        if type(t) is dtensor
        else signature(t)
        for t in tensors
    ]


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


def default_store() -> Any:
    """Return the key-value store that the default process group was made with, if it is there."""
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_default_store()
    except (AttributeError, ValueError):
        return None


def sequence_number(process_group: Any) -> int:
    """Count a group's collectives, alike on all ranks that have made the same calls."""
    try:
        return int(process_group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return 0


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that this one was cut from by slicing, flattening or unflattening."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)


def group_accelerator(process_group: Any) -> str | None:
    """Return the accelerator's device type that a group has a backend of its own for.

    Gloo lists CUDA too, and would go through the host itself.
    """
    import torch.distributed as dist

    if not torch.accelerator.is_available():
        return None
    config = dist.get_backend_config(process_group)  # "cpu:gloo,cuda:nccl"
    for kind, backend in (pair.split(":") for pair in config.split(",") if ":" in pair):
        if kind != "cpu" and backend not in ("gloo", "fake"):
            return kind
    return None


def bytes_device(process_group: Any, device: torch.device | None) -> torch.device | None:
    """Return where a group exchanges bytes: on CPU, where they are, if it can, else ``device``."""
    import torch.distributed as dist

    config = dist.get_backend_config(process_group)
    return torch.device("cpu") if "cpu:" in config else device


def is_registered(process_group: Any) -> bool:
    """Whether torch knows a process group: it forgets those that are destroyed."""
    from torch.distributed import distributed_c10d

    try:
        return process_group in distributed_c10d._world.pg_group_ranks
    except AttributeError:
        return True


def device_errors() -> tuple[type[Exception], ...]:
    """Return what torch raises where a device has failed or is full."""
    names = ("AcceleratorError", "OutOfMemoryError")
    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))


def is_fsdp1_flattened(parameter: Tensor) -> bool:
    """Whether FSDP1 has taken this parameter into (or is it itself) a flat parameter."""
    return bool(getattr(parameter, "_fsdp_flattened", False)) or hasattr(
        parameter, "_shard_param_infos"
    )


def unsharded_by_fsdp(modules: Iterable[Any]) -> dict[int, int] | None:
    """Tell by ``id`` what FSDP2 puts into these modules for its passes, whole, for which shard.

    None where that cannot be told: modules inside one that is sharded, which is not among them.
    """
    cls: Any = _loaded("torch.distributed.fsdp", "FSDPModule")
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


def bare_mesh(ranks: Any) -> Any:
    """Make a device mesh that only says where ranks are: no process group is created for it."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", ranks, _init_backend=False)
