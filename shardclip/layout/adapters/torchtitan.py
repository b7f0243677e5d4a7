"""torchtitan: meshes unflattened from one axis, so that a parameter does not show its stage.

Its pipeline axis is always the outermost one: stage s holds the s-th run of consecutive ranks.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate

from shardclip import compat
from shardclip.layout import ownership

Placed = tuple[Any, tuple[Placement, ...]]


def layout(parallel_dims: Any) -> Callable[[Tensor], Placed]:
    """Return the ``layout=`` for a model that torchtitan has parallelized.

    In place of its own function, for every mix of FSDP, HSDP, TP, EP and PP::

        clip_grad_norm_(parameters, max_norm, layout=torchtitan.layout(parallel_dims))

    A ``GradClipper`` of named parameters does not need it: names tell the stages apart.

    Args:
        parallel_dims: torchtitan's ``ParallelDims``: its ``pp`` and ``world_size`` are read.

    Raises:
        TypeError: It is no ``ParallelDims``.

    Communication:
        None.
    """
    if not (hasattr(parallel_dims, "pp") and hasattr(parallel_dims, "world_size")):
        raise TypeError(
            f"parallel_dims must be torchtitan's ParallelDims, got {type(parallel_dims).__name__}"
        )
    size = parallel_dims.world_size // parallel_dims.pp
    stage = dist.get_rank() // size
    ranks = tuple(range(stage * size, (stage + 1) * size))
    whole = compat.bare_mesh(ranks)
    meshes: dict[Any, Any] = {}

    def place(parameter: Tensor) -> Placed:
        if not compat.is_dtensor(parameter):
            return whole, (Replicate(),)
        mesh, placements = compat.mesh_and_placements(parameter)
        if mesh not in meshes:
            meshes[mesh] = _over_stage(mesh, ranks)
        return meshes[mesh], (Replicate(), *placements)

    return place


def _over_stage(mesh: Any, stage: tuple[int, ...]) -> Any:
    """Add an axis to a mesh, over its translates in the rest of the stage: those hold copies.

    Raises:
        ValueError: The mesh does not tile the stage.
    """
    own = mesh.mesh
    positions = [rank - stage[0] for rank in own.flatten().tolist()]
    inside = all(0 <= position < len(stage) for position in positions)
    offsets = ownership.tile_offsets(positions, len(stage)) if inside else None
    if offsets is None:
        raise ValueError(
            f"its mesh of ranks {own.tolist()} does not fit this rank's pipeline stage, ranks "
            f"{stage[0]} to {stage[-1]}"
        )
    lowest = min(positions)
    return compat.bare_mesh([(own + (offset - lowest)).tolist() for offset in offsets])
