"""Sharded tensors built without communication, and the float64 answers of the unsharded ones."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@functools.cache
def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh over all ranks, made once per process (every rank asks in the same order)."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@functools.cache
def mesh_over(*ranks: int) -> DeviceMesh:
    """A one-axis mesh of its own over these ranks; every rank of the world must ask."""
    return DeviceMesh("cpu", list(ranks))


def piece(
    full: Tensor, shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Tensor:
    """What the rank at `coordinate` of a mesh of this shape holds of the full tensor.

    Chunks as torch cuts them. A strided shard is one that was cut last though it stands first
    (FSDP2 over a tensor-parallel parameter), so those axes are cut after all others.
    """
    plain = [axis for axis, where in enumerate(placements) if isinstance(where, Shard)]
    strided = [axis for axis, where in enumerate(placements) if isinstance(where, _StridedShard)]
    plain = [axis for axis in plain if axis not in strided]
    for axis in plain + strided[::-1]:
        dim = placements[axis].dim
        step = math.ceil(full.shape[dim] / shape[axis])
        start = min(step * coordinate[axis], full.shape[dim])
        full = full.narrow(dim, start, min(step, full.shape[dim] - start))
    return full.clone()


def sharded(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's DTensor of the full tensor."""
    local = piece(full, mesh.shape, mesh.get_coordinate(), placements)
    shape = (full.shape, full.contiguous().stride())
    return DTensor.from_local(local, mesh, placements, shape=shape[0], stride=shape[1])


def labelled(local: Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """A DTensor that says so of a local tensor, whether it is true or not."""
    return DTensor.from_local(local, mesh, placements, run_check=False)


def parameter(grad: Tensor | None, like: Tensor | None = None) -> nn.Parameter:
    """A parameter with this gradient."""
    made = nn.Parameter(torch.zeros_like(grad if grad is not None else like))
    made.grad = grad
    return made


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def exact_norm(tensors: Sequence[Tensor], p: float = 2.0) -> float:
    """The norm of the unsharded tensors in float64."""
    sizes = [tensor.detach().to(torch.complex128).abs().flatten() for tensor in tensors]
    if not sizes:
        return 0.0
    values = torch.cat(sizes)
    if p == 0 and values.isnan().any():
        return math.nan  # a NaN anywhere is a NaN everywhere, for every p
    if values.numel() == 0:
        return 0.0
    return torch.linalg.vector_norm(values, p).item()


def coefficient(norm: float, max_norm: float) -> float:
    """The factor that the torch-named functions multiply by."""
    factor = max_norm / (norm + 1e-6)
    return factor if math.isnan(factor) else min(1.0, factor)


def scaled(full: Tensor, factor: float) -> Tensor:
    """The clipped gradient, rounded once to its dtype."""
    wide = torch.complex128 if full.is_complex() else torch.float64
    return (full.to(wide) * factor).to(full.dtype)


ROUNDING = {  # of one product, where the factor is as exact as the norm: to 1e-6
    torch.float64: 2e-6,
    torch.complex64: 2e-6,
    torch.float32: 2e-6,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}


SUBNORMAL = {  # one step of the smallest numbers, where relative precision ends
    torch.bfloat16: 2.0**-133,
    torch.float16: 2.0**-24,
    torch.float32: 2.0**-149,
    torch.complex64: 2.0**-148,
    torch.float64: 0.0,
}


def assert_same_values(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of one multiplication; NaN equals NaN."""
    rtol, atol = ROUNDING[expected.dtype], SUBNORMAL[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


@dataclass(frozen=True)
class Sharded:
    """One tensor of the unsharded model, and where it lies; without a mesh it is plain."""

    full: Tensor
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    @property
    def here(self) -> bool:
        return self.mesh is None or self.mesh.get_coordinate() is not None

    def build(self, full: Tensor | None = None) -> Tensor:
        full = self.full if full is None else full
        return full.clone() if self.mesh is None else sharded(full, self.mesh, self.placements)


def strided(dim: int, split_factor: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=split_factor)


R = Replicate()
S0 = Shard(0)
S1 = Shard(1)
