"""Local sums taken during the backward pass, as each gradient becomes ready.

A hook after each parameter's accumulation sums its gradient while it is warm; the clipping call
then has only the small ones left, and the all-reduce. A sum is used only if its gradient is still
the same tensor in the same version; else the gradient is summed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import compat, kernels, norm
from .gradients import Source
from .plan import Plan
from .seats import Seat, cut
from .world import World

Build = Callable[[Sequence[Tensor], Sequence[int], int], kernels.Kernel]

SMALL = 1 << 15  # elements; below, a hook costs more than the sum

ON_PLAIN = (
    "overlap=True takes the gradients of DTensor parameters (FSDP2's) during the backward pass. "
    "Others may be averaged after their hook has run, as DistributedDataParallel does: clip_() "
    "sums those itself"
)
ON_OFFLOAD = (
    "overlap=True under FSDP2's CPU offload: a hook on a parameter makes FSDP2 wait for each copy "
    "of a gradient to the host instead of copying asynchronously. Keep whichever is faster for you"
)


@dataclass(frozen=True)
class _Early:
    """One gradient's sum.

    Attributes:
        grad: The gradient, which must not outlive its step.
        version: What it was then.
        power_sum: float64 of shape ``(1,)``, on the gradient's device.
    """

    grad: weakref.ref[Tensor]
    version: tuple[int, int]
    power_sum: Tensor

    def is_of(self, grad: Tensor | None) -> bool:
        """Whether it is the sum of this gradient as it is now."""
        return grad is not None and grad is self.grad() and _version(grad) == self.version


def _version(grad: Tensor) -> tuple[int, int]:
    """Tell what has been changed in place: through a DTensor, or in its local part."""
    return grad._version, compat.local_tensor(grad)._version


class Overlap:
    """The hooks of one clipper, and what they have summed since the last step."""

    def __init__(self, sources: Sequence[Source], p: float, world: World) -> None:
        """Register a hook for each parameter whose gradient is final when the hook runs."""
        self.early: dict[int, _Early] = {}
        self.streams: dict[torch.device, torch.Stream] = {}
        self._p = p
        self._seats: dict[int, tuple[int, Seat]] = {}
        self._positions: list[int] = []
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        self._build: Build = kernels.build
        self._kernels: dict[int, kernels.Kernel] = {}
        trained = [s for s in sources if getattr(s.parameter, "requires_grad", False)]
        hooked = [s.parameter for s in trained if _is_final(s, world)]
        self.notices = []
        if len(hooked) < len(trained):
            self.notices.append(ON_PLAIN)
        elsewhere = world.device is not None and world.device.type != "cpu"
        if elsewhere and any(parameter.device.type == "cpu" for parameter in hooked):
            self.notices.append(ON_OFFLOAD)
        observe = _observer(weakref.ref(self))
        handles = [parameter.register_post_accumulate_grad_hook(observe) for parameter in hooked]
        weakref.finalize(self, _remove, handles)

    def drop_outdated(self, grads: Sequence[Tensor | None]) -> None:
        """Forget the sums of gradients that were changed or replaced after their hook."""
        self._seen.clear()
        for index in list(self.early):
            if not self.early[index].is_of(grads[self._positions[index]]):
                del self.early[index]

    def follow(self, plan: Plan) -> None:
        """Sum from now on what this plan reads, and let its kernel use that."""
        self.early.clear()
        self._kernels.clear()
        self._build = plan.build
        self._positions = [seat.position for seat in plan.read()]
        self._seats = {
            id(seat.source.parameter): (index, seat)
            for index, seat in enumerate(plan.read())
            if compat.local_numel(seat.source.parameter) >= SMALL
        }
        build = plan.build
        plan.build = lambda tensors, buckets, count: _Sums(self, build, tensors, buckets, count)

    @torch.no_grad()
    def observe(self, parameter: Tensor) -> None:
        """Sum a gradient that has just been accumulated."""
        index, seat = self._seats.get(id(parameter), (-1, None))
        if parameter.grad is None:
            return
        self._accept_accumulation(parameter, parameter.grad)
        if seat is None:
            return
        local = compat.local_tensor(parameter.grad)
        if not compat.is_plain(local) or not compat.is_strided(local):
            return
        part = cut(seat, local)
        if index not in self._kernels:
            self._kernels[index] = self._build([part], [0], 1)
        with self._aside(part):
            power_sum = self._kernels[index]([part], self._p)
        self.early[index] = _Early(weakref.ref(parameter.grad), _version(parameter.grad), power_sum)

    def _accept_accumulation(self, parameter: Tensor, grad: Tensor) -> None:
        """Keep the sums of gradients whose version has moved by this one's accumulation alone.

        FSDP2's gradients of one unit are views of one tensor and so share a version. Accumulating
        into one of them, in place, counts it up by exactly one.
        """
        before = self._seen.get(id(parameter))
        self._seen[id(parameter)] = weakref.ref(grad)
        if before is None or before() is not grad:
            return  # this gradient is new: nothing was accumulated
        storage = compat.local_tensor(grad).untyped_storage()._cdata
        count = _version(grad)[1]
        for other, early in self.early.items():
            alive = early.grad()
            if alive is None or early.version[1] != count - 1:
                continue
            local = compat.local_tensor(alive)
            through_wrapper = local is not alive and alive._version != early.version[0]
            if local.untyped_storage()._cdata == storage and not through_wrapper:
                self.early[other] = replace(early, version=_version(alive))

    @contextmanager
    def _aside(self, part: Tensor) -> Iterator[None]:
        """On an accelerator work on a side stream, behind what has made the gradient."""
        if part.device.type == "cpu":
            yield
            return
        if part.device not in self.streams:
            self.streams[part.device] = torch.Stream(part.device)
        stream = self.streams[part.device]
        stream.wait_stream(torch.accelerator.current_stream(part.device))
        with stream:
            yield
        part.record_stream(stream)  # its memory must not be given away before it is read


class _Sums:
    """A kernel that reads only what the hooks have not summed; see ``kernels.build``."""

    each: Tensor | None = None

    def __init__(
        self,
        overlap: Overlap,
        build: Build,
        tensors: Sequence[Tensor],
        buckets: Sequence[int],
        count: int,
    ) -> None:
        self._overlap = overlap
        self._build = build
        self._buckets = list(buckets)
        self._count = count
        self._home = tensors[0].device if tensors else torch.device("cpu")
        self._rest: dict[tuple[int, ...], kernels.Kernel] = {}

    def __call__(self, tensors: Sequence[Tensor], p: float) -> Tensor:
        """Sum tensors like those that this was built for."""
        used = dict(sorted(self._overlap.early.items()))
        self._overlap.early.clear()
        rest = tuple(i for i in range(len(tensors)) if i not in used)
        if rest not in self._rest:
            buckets = [self._buckets[i] for i in rest]
            built = self._build([tensors[i] for i in rest], buckets, self._count)
            self._rest = {rest: built}  # the same in nearly every step
        sums = compat.to_device(self._rest[rest]([tensors[i] for i in rest], p), self._home)
        if not used:
            return sums
        for device, stream in self._overlap.streams.items():
            torch.accelerator.current_stream(device).wait_stream(stream)
        taken = torch.cat([compat.to_device(one.power_sum, self._home) for one in used.values()])
        places = compat.on_host([self._buckets[i] for i in used], torch.int64)
        places = compat.to_device(places, self._home)
        if norm.is_maximum(p):
            return sums.scatter_reduce_(0, places, taken, "amax")  # keeps NaN
        return sums.index_add_(0, places, taken)


def _is_final(source: Source, world: World) -> bool:
    """Whether a gradient is reduced already when its hook runs."""
    parameter = source.parameter
    if source.span is not None or not parameter.is_leaf or compat.is_fsdp1_flattened(parameter):
        return False
    return compat.is_dtensor(parameter) or world.size == 1


def _observer(overlap: weakref.ref[Overlap]) -> Callable[[Tensor], None]:
    """Make a hook that does not keep the clipper alive."""

    def observe(parameter: Tensor) -> None:
        found = overlap()
        if found is not None:
            found.observe(parameter)

    return observe


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
