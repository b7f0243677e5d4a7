"""Counts what a call does: collectives, bytes of memory read and written, reads by the host.

Counted from the operators that reach torch's dispatcher and the tensors that they are given, not
from what a call ought to do. Only floating-point and complex storage counts. What an
operator does inside (a cache it misses, a temporary buffer) is not seen, nor is a kernel that is
launched past the dispatcher.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SUBCLASSES = (DTensor, AsyncCollectiveTensor, FakeTensor)  # made of other tensors, or of none
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"}
_LOCAL = {"wait_tensor", "_wrap_tensor_autograd"}  # of those namespaces, what sends nothing
_HOST_READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"}
_UNSEEN_READS = ("tolist", "cpu", "numpy")  # on CPU these pass by the dispatcher
_GATHERS = {"index", "index_select", "gather", "take", "embedding"}  # read only what they give
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "_foreach_copy_"}
_OVERWRITES |= {"_foreach_zero_", "set_"}


@dataclass
class Counts:
    """What a call did on this rank.

    Attributes:
        all_reduces: All-reduces.
        collectives: Collectives of any kind, all-reduces included.
        payload: Bytes that this rank handed to them.
        read: Bytes that operators read.
        written: Bytes that they wrote.
        gradients_read: Of `read`, from the gradients' own storage.
        gradients_written: Of `written`, to it.
        host_reads: Values read by the host: on a device each waits for it, on CPU it is free.
    """

    all_reduces: int = 0
    collectives: int = 0
    payload: int = 0
    read: int = 0
    written: int = 0
    gradients_read: int = 0
    gradients_written: int = 0
    host_reads: int = 0


@contextmanager
def counting(gradients: Iterable[Tensor] = ()) -> Iterator[Counts]:
    """Count what the block does on this rank.

    Args:
        gradients: Local tensors; what is read from and written to their storage is told apart.
    """
    counts = Counts()
    with _Recorder(counts, gradients), _host_reads(counts):
        yield counts


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds every operator to the counts."""

    def __init__(self, counts: Counts, gradients: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts
        self.gradients = {_storage(tensor) for tensor in gradients}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let a subclass's operator come back as what it does to plain tensors, and count that."""
        if any(issubclass(kind, _SUBCLASSES) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in _COLLECTIVES:
            if name not in _LOCAL:
                self._collective(name, args)
        else:
            self.counts.host_reads += name in _HOST_READS
            self._traffic(func, name, args, kwargs or {}, out)
        return out

    def _collective(self, name: str, args: Any) -> None:
        self.counts.collectives += 1
        self.counts.all_reduces += "allreduce" in name.replace("_", "")
        self.counts.payload += sum(_size(tensor) for tensor in _tensors(args))

    def _traffic(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        read, written = traffic(func, name, args, kwargs, out)
        counts = self.counts
        counts.read += sum(size for _, size in read)
        counts.written += sum(size for _, size in written)
        counts.gradients_read += sum(size for where, size in read if where in self.gradients)
        counts.gradients_written += sum(size for where, size in written if where in self.gradients)


Touched = list[tuple[int, int]]
"""Storage by storage, how many bytes."""


def traffic(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> tuple[Touched, Touched]:
    """List what an operator read and wrote, from its schema and the tensors it was given.

    An argument that the schema marks as written is read too, unless the operator overwrites it. A
    result that lies in an argument's storage is a view, and new memory is written as a whole.
    """
    read: list[Tensor] = []
    written: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = _tensors(given)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if name.startswith("_fused_") and argument.name == "grads":
            writes = kwargs.get("grad_scale") is not None  # only then written back
        if writes:
            written += tensors
        if not (writes and (argument.is_out or name in _OVERWRITES)):
            read += tensors
    if name in _HOST_READS:
        return _touched(read), []
    held = {_storage(tensor) for tensor in [*read, *written]}
    made = [tensor for tensor in _tensors(out) if _storage(tensor) not in held]
    if not written and not made and _tensors(out):
        return [], []  # a view
    if "empty" in name or name == "_lazy_clone":  # shares the memory until somebody writes
        return [], []
    if name in _GATHERS:
        given = [(_storage(source), sum(map(_size, made))) for source in read[:1]]
        return [*given, *_touched(read[1:])], _touched(made)
    return _touched(read), _touched([*written, *made])


def _tensors(value: Any) -> list[Tensor]:
    """List the tensors of floating-point or complex numbers in a nested value."""
    leaves = tree_leaves(value)
    return [
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor)
        and (leaf.is_floating_point() or leaf.is_complex())
        and leaf.device.type != "meta"
    ]


def _touched(tensors: Iterable[Tensor]) -> Touched:
    """Tell where tensors lie and how large they are; the same one twice counts once."""
    once = {(_storage(t), t.storage_offset(), t.shape, t.stride()): t for t in tensors}
    return [(_storage(tensor), _size(tensor)) for tensor in once.values()]


def _size(tensor: Tensor) -> int:
    """Count a tensor's bytes; what is expanded counts once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride or not length else 1
    return size


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # asking for an address counts as writing there


@contextmanager
def _host_reads(counts: Counts) -> Iterator[None]:
    """Count the reads that don't pass the dispatcher where the tensor is on the host already."""

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            counts.host_reads += 1
            return original(self, *args, **kwargs)

        return method

    for name in _UNSEEN_READS:
        setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name in _UNSEEN_READS:
            delattr(torch.Tensor, name)  # the base class has it
