"""Where a tensor lies in memory, and whether it is the one that was seen before."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .tensors import is_dtensor, is_strided, loaded


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
    dtensor: Any = loaded("torch.distributed.tensor", "DTensor")
    return [
        (Tensor, t.shape, t.dtype, t.device)
        if type(t) is Tensor and t.layout is torch.strided
        else t._spec
        if type(t) is dtensor
        else signature(t)
        for t in tensors
    ]
