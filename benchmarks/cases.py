"""Named sets of gradients: which shapes, sharded over which mesh."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


@dataclass(frozen=True)
class Case:
    """Gradients of one layout.

    Attributes:
        name: What `--case` calls it.
        count: Number of parameters, all of one shape.
        shape: Rows and columns of each; the shards divide the rows evenly.
        mesh: Sizes of the mesh's axes. The last axis shards dim 0 as FSDP2 does, those before it
            replicate as HSDP does. Empty: plain tensors in one process without a group.
    """

    name: str
    count: int
    shape: tuple[int, int]
    mesh: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Number of processes."""
        ranks = 1
        for size in self.mesh:
            ranks *= size
        return ranks

    @property
    def elements(self) -> int:
        """Number of gradient elements in the whole model."""
        return self.count * self.shape[0] * self.shape[1]


CASES = (
    Case("fsdp2-layers", 24, (1024, 1024), (4,)),
    Case("fsdp2-small", 1000, (64, 64), (4,)),
    Case("hsdp", 24, (1024, 1024), (2, 2)),
    Case("one-process", 24, (1024, 1024), ()),
)


def quick(case: Case) -> Case:
    """Return the same layout with tiny sizes, for a smoke test."""
    return replace(case, count=min(case.count, 8), shape=(8, 4))


@dataclass(frozen=True)
class Gradients:
    """One rank's parameters with their gradients, and what they were.

    Attributes:
        parameters: What is handed to the functions.
        locals: The gradients' storage on this rank.
        saved: What `locals` held at first.
        norm: The true global norm, in float64.
    """

    parameters: list[nn.Parameter]
    locals: list[Tensor]
    saved: list[Tensor]
    norm: float

    def restore(self) -> None:
        """Give every parameter a new gradient with the values that it had at first.

        A backward does the same: the tensor is a new object in every step, and under FSDP2 it
        shares its parameter's description of mesh and placements.
        """
        for parameter, local, saved in zip(self.parameters, self.locals, self.saved, strict=True):
            local.copy_(saved)
            parameter.grad = _like(parameter, local)


def build(case: Case, seed: int) -> Gradients:
    """Build this rank's gradients; replicas hold the same values, shards hold different ones."""
    mesh = init_device_mesh("cpu", case.mesh) if case.mesh else None
    shards = case.mesh[-1] if case.mesh else 1
    shard = mesh.get_local_rank(mesh.ndim - 1) if mesh is not None else 0
    generator = torch.Generator().manual_seed(seed * shards + shard)
    rows, columns = case.shape
    local_shape = (rows // shards, columns)
    saved = [torch.randn(local_shape, generator=generator) for _ in range(case.count)]
    parameters = [nn.Parameter(_spread(torch.zeros(local_shape), case.shape, mesh)) for _ in saved]
    storage = [torch.empty(local_shape) for _ in saved]
    gradients = Gradients(parameters, storage, saved, _true_norm(saved, case.ranks // shards))
    gradients.restore()
    return gradients


def _like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """Wrap a local tensor as the parameter's gradient, as FSDP2 does: by DTensor's constructor."""
    if isinstance(parameter, DTensor):
        return DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return local.detach()


def _spread(local: Tensor, shape: tuple[int, int], mesh: DeviceMesh | None) -> Tensor:
    if mesh is None:
        return local
    placements: Sequence[Placement] = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )


def _true_norm(tensors: list[Tensor], replicas: int) -> float:
    squares = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        squares += tensor.double().square().sum()
    if dist.is_initialized():
        dist.all_reduce(squares)
    return math.sqrt(float(squares) / replicas)
