"""How a whole tensor lies on the ranks: which piece this rank holds, and how many hold it too.

The meshes and placements are those that the frameworks give; a test compares them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from .case import Case
from .shapes import Shape

_TWO = 2  # ranks along the axis that is not FSDP's


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a tensor.

    Attributes:
        shape: Of the local tensor.
        padded: Elements that it takes in FSDP2's buffer: uneven shards are padded there.
        number: Which piece it is: ranks with the same number hold copies.
        copies: How many ranks hold it.
        mesh: The tensor's mesh; None for a plain tensor.
        placements: One for each axis.
    """

    shape: Shape
    padded: int
    number: int = 0
    copies: int = 1
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()


Split = Callable[[int, Shape], Piece]
"""From a parameter's index and shape to this rank's piece."""


def split_for(case: Case) -> Split:
    """Make the layout's meshes; every rank must call."""
    if case.layout in ("plain", "ddp"):
        return lambda _, shape: Piece(shape, _product(shape), copies=case.ranks)
    if case.layout == "fsdp2":
        return _sharded(init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("fsdp",)))
    pairs = case.ranks // _TWO
    if case.layout == "hsdp":
        names = ("dp_replicate", "dp_shard")
        return _replicated(init_device_mesh("cpu", (_TWO, pairs), mesh_dim_names=names))
    if case.layout == "fsdp-tp":
        return _tensor_parallel(
            init_device_mesh("cpu", (pairs, _TWO), mesh_dim_names=("dp_shard", "tp"))
        )
    if case.layout == "two-meshes":
        dense = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("fsdp",))
        experts = init_device_mesh("cpu", (pairs, _TWO), mesh_dim_names=("efsdp", "ep"))
        return _experts(dense, experts)
    raise ValueError(f"{case.layout} is built by its framework")


def _sharded(mesh: DeviceMesh) -> Split:
    """FSDP2: rows, in chunks of equal size, the last ones smaller or empty."""

    def split(_: int, shape: Shape) -> Piece:
        rows, padded = _chunk(shape, 0, mesh, 0)
        return Piece(rows, padded, mesh.get_local_rank(0), 1, mesh, (Shard(0),))

    return split


def _replicated(mesh: DeviceMesh) -> Split:
    """HSDP: replicas of FSDP2."""

    def split(_: int, shape: Shape) -> Piece:
        rows, padded = _chunk(shape, 0, mesh, 1)
        number = mesh.get_local_rank(1)
        return Piece(rows, padded, number, mesh.size(0), mesh, (Replicate(), Shard(0)))

    return split


def _tensor_parallel(mesh: DeviceMesh) -> Split:
    """FSDP2 over tensor parallel: matrices by rows and by columns in turn, vectors on all."""

    def split(index: int, shape: Shape) -> Piece:
        dp, tp = mesh.get_coordinate() or (0, 0)
        if len(shape) == 1:
            held, padded = _chunk(shape, 0, mesh, 0)
            return Piece(held, padded, dp, mesh.size(1), mesh, (Shard(0), Replicate()))
        columns = index % 2
        held, _ = _chunk(shape, columns, mesh, 1)
        held, padded = _chunk(held, 0, mesh, 0)
        first = Shard(0) if columns else _StridedShard(0, split_factor=mesh.size(1))
        number = dp * mesh.size(1) + tp
        return Piece(held, padded, number, 1, mesh, (first, Shard(columns)))

    return split


def _experts(dense: DeviceMesh, experts: DeviceMesh) -> Split:
    """Every other matrix is an expert: its rows over `ep`, its columns over `efsdp`."""
    plain = _sharded(dense)

    def split(index: int, shape: Shape) -> Piece:
        if len(shape) == 1 or index % 2:
            return plain(index, shape)
        held, _ = _chunk(shape, 0, experts, 1)
        held, padded = _chunk(held, 1, experts, 0)
        efsdp, ep = experts.get_coordinate() or (0, 0)
        number = efsdp * experts.size(1) + ep
        return Piece(held, padded, number, 1, experts, (Shard(1), Shard(0)))

    return split


def _chunk(shape: Shape, dim: int, mesh: DeviceMesh, axis: int) -> tuple[Shape, int]:
    """Return this rank's chunk along a dim, and the elements of a full one."""
    size, index = mesh.size(axis), mesh.get_local_rank(axis)
    most = -(-shape[dim] // size)
    length = max(0, min(most, shape[dim] - index * most))
    rest = _product(shape) // shape[dim]
    return (*shape[:dim], length, *shape[dim + 1 :]), most * rest


def _product(shape: Shape) -> int:
    return torch.Size(shape).numel()
