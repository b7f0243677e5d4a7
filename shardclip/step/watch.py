"""Whether memory has been written to: torch's own copy-on-write mark tells.

Version counters do not: ``torch._foreach_*`` and ``GradScaler.unscale_``, collectives, ``.data``
and NumPy move none. But whatever asks torch for an address to write to, in whatever way, first
takes a copy-on-write mark off the memory, for every view of it. Reading leaves it on.

Such memory is copied before a write only where a lazy clone still uses it. Here the clone is gone
at once, so that nothing is ever copied and no address changes. The mark is all that stays.
"""

from __future__ import annotations

import functools
import weakref

import torch
from torch import Tensor

from shardclip import compat


class Watch:
    """One tensor's memory, from ``begin`` on.

    Attributes:
        over: It has been written to, though the mark may be back: another watch has begun since.
    """

    def __init__(self, address: int) -> None:
        self.over = False
        self._address = address

    def saw_nothing(self, tensor: Tensor) -> bool:
        """Whether nobody has written to the tensor's memory, which is still the same."""
        same = compat.storage_address(tensor) == self._address
        return same and not self.over and compat.is_marked(tensor)


_watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()
"""By address: several clippers may watch the same, and one must not hide a write from another."""


def begin(tensor: Tensor) -> Watch | None:
    """Watch a tensor's memory; None where that is not possible.

    It is not on accelerators: CUDA's ``_foreach`` kernels write without taking the mark off. Nor is
    it for memory that torch has not allocated itself: NumPy's, shared, or pinned.
    """
    if not works_on(tensor.device):
        return None
    address = compat.storage_address(tensor)
    held = _watches.get(address)
    if held is not None and held.saw_nothing(tensor):
        return held
    if held is not None:
        held.over = True
    if not compat.mark(tensor):
        return None
    watch = _watches[address] = Watch(address)
    return watch


def end(tensor: Tensor) -> None:
    """Make a tensor's memory what it was, for all who watch it."""
    compat.unmark(tensor)


def works_on(device: torch.device) -> bool:
    """Whether memory of this device can be watched."""
    return device.type == "cpu" and _works()


@functools.cache
def _works() -> bool:
    """Whether this version of torch keeps and takes off the marks as is needed; tried once."""
    with torch.inference_mode(False), torch.no_grad():
        scale, found = torch.ones((), device="cpu"), torch.zeros((), device="cpu")
        writes = (
            lambda t: t.mul_(1),
            lambda t: t[:1].data.zero_(),
            lambda t: torch._foreach_mul_([t], 1.0),
            lambda t: torch._amp_foreach_non_finite_check_and_unscale_([t], found, scale),
            Tensor.data_ptr,
        )
        for write in writes:
            tensor = torch.ones(4, dtype=torch.float32, device="cpu")
            if not compat.mark(tensor):
                return False
            address = compat.storage_address(tensor)
            torch.linalg.vector_norm(tensor)
            kept = compat.is_marked(tensor)
            write(tensor)
            if not kept or compat.is_marked(tensor) or compat.storage_address(tensor) != address:
                return False
    return True
