"""Local sums taken during the backward pass, as each gradient becomes ready.

A hook after each parameter's accumulation sums its gradient while it is warm; the clipping call
then has only the small ones left, and the all-reduce. A sum is used only if its gradient is proved
unchanged. Version counters prove nothing: ``torch._foreach_*`` on DTensors, ``unscale_``,
collectives and ``.data`` do not move them. What does is torch's copy-on-write: the hook keeps a
lazy copy of the gradient, so that whatever writes to the memory through torch moves the gradient
elsewhere first. Where it still lies at the copy's address, nobody has written. Else the gradient
is summed again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardclip import compat, kernels
from shardclip.comm import World
from shardclip.layout import Source
from shardclip.math import norm
from shardclip.plan import Plan, Seat, cut

Build = Callable[[Sequence[Tensor], Sequence[int], int], kernels.Kernel]

SMALL = 1 << 15  # elements; below, a hook costs more than the sum

ON_PLAIN = (
    "overlap=True takes the gradients of DTensor parameters (FSDP2's) during the backward pass. "
    "Others may be averaged after their hook has run, as DistributedDataParallel does: clip_() "
    "sums those itself"
)
ON_OFFLOAD = (
    "overlap=True under FSDP2's CPU offload: a gradient may still be on its way to the host when "
    "its hook runs, so clip_() sums those itself"
)


@dataclass(frozen=True)
class _Early:
    """One gradient's sum.

    Attributes:
        grad: The gradient, which must not outlive its step.
        copy: A lazy copy of its local part: it takes no memory until somebody writes.
        power_sum: float64 of shape ``(1,)``, on the gradient's device.
    """

    grad: weakref.ref[Tensor]
    copy: Tensor
    power_sum: Tensor

    def is_of(self, grad: Tensor | None) -> bool:
        """Whether it is the sum of this gradient as it is now."""
        if grad is None or grad is not self.grad():
            return False
        return compat.is_unwritten(compat.local_tensor(grad), self.copy)


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
        self._calls: Counter[int] = Counter()  # of the hooks, by the parameter, since the last step
        self._usual: Counter[int] = Counter()  # in the step before
        self._build: Build = kernels.build
        self._kernels: dict[int, kernels.Kernel] = {}
        trained = [s for s in sources if getattr(s.parameter, "requires_grad", False)]
        final = [s.parameter for s in trained if _is_final(s, world)]
        elsewhere = world.device is not None and world.device.type != "cpu"
        hooked = [p for p in final if not (elsewhere and p.device.type == "cpu")]
        self.notices = [ON_PLAIN] if len(final) < len(trained) else []
        self.notices += [ON_OFFLOAD] if len(hooked) < len(final) else []
        observe = _Observer(weakref.ref(self))
        handles = [parameter.register_post_accumulate_grad_hook(observe) for parameter in hooked]
        weakref.finalize(self, _remove, handles)

    def drop_outdated(self, grads: Sequence[Tensor | None]) -> None:
        """Forget the sums of gradients that were changed or replaced after their hook."""
        self._usual, self._calls = self._calls, Counter()
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
        if seat is None or parameter.grad is None:
            return
        self.early.pop(index, None)
        if not self._is_whole(parameter, parameter.grad) or _has_other_hooks(parameter):
            return
        local = compat.local_tensor(parameter.grad)
        if not compat.is_plain(local) or not compat.is_strided(local):
            return
        copy = compat.lazy_copy(local)
        if copy is None:
            return
        part = cut(seat, local)
        if index not in self._kernels:
            self._kernels[index] = self._build([part], [0], 1)
        with self._aside(part):
            power_sum = self._kernels[index]([part], self._p)
        forget = partial(_forget, weakref.ref(self), index)
        self.early[index] = _Early(weakref.ref(parameter.grad, forget), copy, power_sum)

    def _is_whole(self, parameter: Tensor, grad: Tensor) -> bool:
        """Whether nothing will be added to a gradient any more, as far as the last step tells.

        FSDP2's gradients of one unit share their memory. Adding to one of them would copy all, if
        a lazy copy of another were kept.
        """
        key = id(parameter)
        self._calls[key] += 1
        before = self._seen.get(key)
        self._seen[key] = weakref.ref(grad)
        added_to = before is not None and before() is grad
        return not added_to and self._calls[key] == 1 and self._usual[key] <= 1

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


class _Observer:
    """A hook that does not keep the clipper alive."""

    def __init__(self, overlap: weakref.ref[Overlap]) -> None:
        self._overlap = overlap

    def __call__(self, parameter: Tensor) -> None:
        """Sum a gradient that has just been accumulated."""
        found = self._overlap()
        if found is not None:
            found.observe(parameter)


def _has_other_hooks(parameter: Tensor) -> bool:
    """Whether a hook of somebody else may have begun to write, say by a collective under way."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(type(hook) is not _Observer for hook in hooks.values())


def _forget(overlap: weakref.ref[Overlap], index: int, _: object) -> None:
    """Let go of a lazy copy when its gradient is gone, or the memory would stay."""
    found = overlap()
    if found is not None:
        found.early.pop(index, None)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
