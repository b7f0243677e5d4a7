"""Gradients given piece by piece, as plain tensors or as the DTensors that a layout leaves."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .case import DTYPES, Case
from .gradients import Gradients, true_norm
from .layouts import Piece, split_for
from .shapes import Shape

_BUFFERED = {"fsdp2", "hsdp", "fsdp-tp", "two-meshes"}  # a block's gradients lie side by side
_SPREAD = 1 << 20  # seeds of different runs stay apart


def build(case: Case, seed: int) -> Gradients:
    """Build this rank's gradients; copies hold the same values, other pieces different ones."""
    split = split_for(case)
    blocks: list[list[tuple[Shape, Piece]]] = []
    index = 0
    for block in case.shapes.blocks:
        blocks.append([(shape, split(index + i, shape)) for i, shape in enumerate(block)])
        index += len(block)
    dtype = DTYPES[case.dtype]
    locals_ = [local for block in blocks for local in _storage(case, block, dtype)]
    flat = [entry for block in blocks for entry in block]
    saved = [_values(piece, seed * _SPREAD + i, dtype) for i, (_, piece) in enumerate(flat)]
    parameters = [
        nn.Parameter(_wrap(torch.zeros_like(v), *e)) for v, e in zip(saved, flat, strict=True)
    ]

    # Two sets in turn: as new to each call as a backward pass's, without the work of making them.
    pairs = list(zip(parameters, locals_, strict=True))
    sets = itertools.cycle([[like(*pair) for pair in pairs] for _ in range(2)])

    def attach() -> None:
        for parameter, grad in zip(parameters, next(sets), strict=True):
            parameter.grad = grad

    norm = true_norm(saved, [piece.copies for _, piece in flat])
    made = Gradients(case, parameters, parameters, locals_, saved, norm, attach)
    made.restore()
    return made


def _storage(case: Case, block: Sequence[tuple[Shape, Piece]], dtype: torch.dtype) -> list[Tensor]:
    """Make room for a block's local gradients.

    FSDP2 leaves them in the output of its reduce-scatter, one after the other, each padded to the
    size of the largest shard; elsewhere each has its own memory.
    """
    if case.layout not in _BUFFERED:
        return [torch.empty(piece.shape, dtype=dtype) for _, piece in block]
    buffer = torch.zeros(sum(piece.padded for _, piece in block), dtype=dtype)
    views, offset = [], 0
    for _, piece in block:
        size = torch.Size(piece.shape)
        views.append(buffer[offset : offset + size.numel()].view(size))
        offset += piece.padded
    return views


def _values(piece: Piece, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 64 + piece.number)
    return torch.randn(piece.shape, generator=generator).to(dtype)


def _wrap(local: Tensor, shape: Shape, piece: Piece) -> Tensor:
    """Make a plain tensor, or the DTensor that the piece is a part of."""
    if piece.mesh is None:
        return local
    whole = torch.empty(shape, dtype=local.dtype, device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(piece.mesh, piece.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """Wrap a local tensor as the parameter's gradient, as FSDP2 does: by DTensor's constructor.

    Like there, the gradient is a new object in every step and shares its parameter's description.
    """
    if isinstance(parameter, DTensor):
        return DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return local.detach()
