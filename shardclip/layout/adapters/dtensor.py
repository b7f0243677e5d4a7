"""DTensor's meshes and placements as pure geometry."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from shardclip import compat
from shardclip.layout import ownership


def check_layout(declared: object) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Check that a layout is ``(DeviceMesh, placements)``.

    Raises:
        ValueError: It is not, the placements are not one for each axis, or one is Partial.
    """
    if not (isinstance(declared, tuple) and len(declared) == 2):
        raise ValueError(f"layout must give (DeviceMesh, placements) or None, got {declared!r}")
    mesh, placements = declared
    if isinstance(placements, Placement):
        placements = (placements,)
    if not isinstance(mesh, DeviceMesh) or not all(isinstance(p, Placement) for p in placements):
        raise ValueError(f"layout must give (DeviceMesh, placements) or None, got {declared!r}")
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"layout gives {len(placements)} placements for a mesh of {mesh.ndim} axes; "
            "give one for each"
        )
    refuse_partial(mesh, placements)
    return mesh, tuple(placements)


def refuse_partial(mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Refuse a tensor that still has to be reduced over an axis.

    Raises:
        ValueError: Names the axis and the mend.
    """
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis)
            raise ValueError(
                f"Partial gradient on mesh axis {name!r}; the square of a sum is not the sum of "
                "squares: reduce it before clipping, for example "
                "grad.redistribute(placements=[Replicate()])"
            )


def place(mesh: DeviceMesh, placements: Sequence[Placement], rank: int) -> ownership.Place | None:
    """Find what this rank holds of a tensor; None where it is not on the tensor's mesh."""
    replicated = tuple(placement.is_replicate() for placement in placements)
    return _place(mesh, compat.root_mesh(mesh), replicated, rank)


@lru_cache(maxsize=1024)
def _place(
    mesh: DeviceMesh, root: DeviceMesh, replicated: tuple[bool, ...], rank: int
) -> ownership.Place | None:
    # The root is part of the key: to torch a slice may equal a mesh that stands for itself.
    described = _describe(mesh)
    if rank not in described.ranks:
        return None
    return ownership.place(described, replicated, _describe(root), rank)


def _describe(mesh: Any) -> ownership.Mesh:
    ranks = tuple(mesh.mesh.flatten().tolist())
    return ownership.Mesh(ranks, tuple(mesh.mesh.shape), tuple(mesh.mesh_dim_names or ()))
