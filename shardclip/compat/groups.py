"""Process groups, their stores, and device meshes."""

from typing import Any

import torch


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


def bare_mesh(ranks: Any) -> Any:
    """Make a device mesh that only says where ranks are: no process group is created for it."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", ranks, _init_backend=False)


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
