"""One rank's gradients of a case, made as its layout makes them, and what they were at first."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .case import DTYPES, Case
from .layouts import Piece, split_for
from .shapes import Shape

_BUFFERED = {"fsdp2", "hsdp", "fsdp-tp", "two-meshes"}  # a block's gradients lie side by side
_SPREAD = 1 << 20  # seeds of different runs stay apart


class UnavailableError(RuntimeError):
    """A framework cannot build its layout here."""


@dataclass(frozen=True)
class Gradients:
    """One rank's parameters with their gradients.

    Attributes:
        case: What they are of.
        target: What is handed to a function that clips: a list of parameters, or a module.
        parameters: The parameters themselves.
        locals: The gradients' values on this rank.
        saved: What `locals` held at first.
        norm: The true global norm, in float64.
        attach: Gives every parameter a new gradient over `locals`, as a backward does.
        engine: DeepSpeed's optimizer, where it holds the gradients.
    """

    case: Case
    target: Any
    parameters: list[nn.Parameter]
    locals: list[Tensor]
    saved: list[Tensor]
    norm: float
    attach: Callable[[], None]
    engine: Any = None

    @property
    def bytes(self) -> int:
        """Bytes of this rank's gradients."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.locals)

    def restore(self) -> None:
        """Give every parameter a new gradient with the values that it had at first."""
        for local, saved in zip(self.locals, self.saved, strict=True):
            local.copy_(saved)
        self.attach()


def build(case: Case, seed: int) -> Gradients:
    """Build this rank's gradients; copies hold the same values, other pieces different ones.

    Raises:
        UnavailableError: The framework that builds the layout is not installed, or cannot.
    """
    if case.layout in ("fsdp1", "zero2"):
        from . import frameworks  # noqa: PLC0415  they import this file

        return frameworks.build(case, seed)
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


def true_norm(tensors: Sequence[Tensor], copies: Sequence[int]) -> float:
    """Return the float64 norm of all ranks' tensors, each divided among those that hold it."""
    squares = torch.zeros((), dtype=torch.float64)
    for tensor, holders in zip(tensors, copies, strict=True):
        for part in torch.split(tensor.reshape(-1), 1 << 22):
            squares += part.double().square().sum() / holders
    if dist.is_initialized():
        dist.all_reduce(squares)
    return math.sqrt(float(squares))
