"""A device that is none: tensors on it have no values, so what would read one raises."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda", 0)


class _Devices(TorchDispatchMode):
    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {
            leaf.device.type for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)
        }
        return out


@contextmanager
def no_host_sync() -> Iterator[None]:
    """In the block the values of a tensor may neither be looked at nor copied to the host."""
    seen: set[str] = set()
    with _Devices(seen):
        yield
    assert seen == {DEVICE.type}, seen


@contextmanager
def accelerator() -> Iterator[torch.device]:
    """The device, for tensors made in the block."""
    with FakeTensorMode():
        yield DEVICE
