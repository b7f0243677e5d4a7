"""Local sums taken during the backward pass, as each gradient becomes ready.

A hook after each parameter's accumulation sums its gradient while it is warm; the clipping call
then has only the small ones left, and the all-reduce. A sum is used only if it is proved that the
gradient is the same: the same tensor in the same memory, which nobody has written to (``watch``).
What is not proved is summed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardclip import compat, kernels
from shardclip.comm import World
from shardclip.layout import Source
from shardclip.math import norm
from shardclip.plan import Plan, Seat, cut

from . import watch

Build = Callable[[Sequence[Tensor], Sequence[int], int], kernels.Kernel]

SMALL = 1 << 15  # elements; below, a hook costs more than the sum

ON_PLAIN = (
    "overlap=True takes the gradients of DTensor parameters (FSDP2's) during the backward pass. "
    "Others may be averaged after their hook has run, as DistributedDataParallel does: clip_() "
    "sums those itself"
)
ON_OFFLOAD = (
    "overlap=True under FSDP2's CPU offload: when a hook runs, the copy of its gradient to the "
    "host may still be under way. clip_() sums those itself"
)
ON_DEVICE = (
    "overlap=True uses a sum of the backward pass only where it is proved that nothing has changed "
    "the gradient afterwards. With torch {} that cannot be proved on {}, where torch._foreach_* "
    "calls and GradScaler.unscale_ leave no trace: clip_() sums those gradients itself"
)


@dataclass(frozen=True)
class _Early:
    """One gradient's sum.

    Attributes:
        grad: The gradient, which must not outlive its step.
        state: What it was then.
        watch: Sees whoever writes to its memory.
        power_sum: float64 of shape ``(1,)``, on the gradient's device.
    """

    grad: weakref.ref[Tensor]
    state: tuple[object, ...]
    watch: watch.Watch
    power_sum: Tensor

    def is_of(self, grad: Tensor | None) -> bool:
        """Whether it is the sum of this gradient as it is now."""
        if grad is None or grad is not self.grad():
            return False
        local = compat.local_tensor(grad)
        return self.watch.saw_nothing(local) and _state(grad, local) == self.state


def _state(grad: Tensor, local: Tensor) -> tuple[object, ...]:
    """Tell where in their memory a gradient's numbers lie, and the versions that count changes."""
    place = local.storage_offset(), local.shape, local.stride(), local.dtype
    return grad._version, local._version, *place


class Overlap:
    """The hooks of one clipper, and what they have summed since the last step."""

    def __init__(self, sources: Sequence[Source], p: float, world: World) -> None:
        """Register a hook for each parameter whose gradient is final when the hook runs."""
        self.early: dict[int, _Early] = {}
        self._p = p
        self._seats: dict[int, tuple[int, Seat]] = {}
        self._positions: list[int] = []
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        self._last: dict[int, int] = {}
        self._waiting: dict[int, list[Tensor]] = {}
        self._build: Build = kernels.build
        self._kernels: dict[int, kernels.Kernel] = {}
        trained = [s for s in sources if getattr(s.parameter, "requires_grad", False)]
        obstacles = [_obstacle(source, world) for source in trained]
        self.notices = list(dict.fromkeys(found for found in obstacles if found is not None))
        pairs = zip(trained, obstacles, strict=True)
        hooked = [source.parameter for source, found in pairs if found is None]
        hook = _Hook(weakref.ref(self))
        handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in hooked]
        weakref.finalize(self, _remove, handles)

    def drop_outdated(self, grads: Sequence[Tensor | None]) -> None:
        """Forget the sums of gradients that were changed or replaced after their hook."""
        for known in (self._seen, self._last, self._waiting):
            known.clear()
        proved = {
            index: early
            for index, early in self.early.items()
            if early.is_of(grads[self._positions[index]])
        }
        for early in self.early.values():  # only now: several may lie in one memory
            grad = early.grad()
            if grad is not None:
                watch.end(compat.local_tensor(grad))
        self.early = proved

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
        """Sum a gradient that has just been accumulated.

        FSDP2's gradients of one unit lie in one memory. Accumulating into one of them is a write
        like any other, so they are summed when the last of them is accumulated.
        """
        grad = parameter.grad
        if grad is None or _has_hooks_of_others(parameter):
            return
        local = compat.local_tensor(grad)
        if not compat.is_plain(local) or not compat.is_strided(local):
            return
        memory = compat.storage_address(local)
        before = self._seen.get(id(parameter))
        self._seen[id(parameter)] = weakref.ref(grad)
        if before is None or before() is not grad:  # new: nothing was accumulated
            self._last[memory] = id(parameter)
            self._sum(parameter, grad)
            return
        self._waiting.setdefault(memory, []).append(parameter)
        if self._last.get(memory) == id(parameter):
            for waiting in self._waiting.pop(memory):
                held = waiting.grad
                if held is not None and held is self._seen[id(waiting)]():
                    self._sum(waiting, held)

    def _sum(self, parameter: Tensor, grad: Tensor) -> None:
        index, seat = self._seats.get(id(parameter), (-1, None))
        if seat is None:
            return
        local = compat.local_tensor(grad)
        part = cut(seat, local)
        if index not in self._kernels:
            self._kernels[index] = self._build([part], [0], 1)
        seen = watch.begin(local)  # first: what is written while it is read counts, too
        if seen is not None:
            power_sum = self._kernels[index]([part], self._p)
            self.early[index] = _Early(weakref.ref(grad), _state(grad, local), seen, power_sum)


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
        taken = torch.cat([compat.to_device(one.power_sum, self._home) for one in used.values()])
        places = compat.on_host([self._buckets[i] for i in used], torch.int64)
        places = compat.to_device(places, self._home)
        if norm.is_maximum(p):
            return sums.scatter_reduce_(0, places, taken, "amax")  # keeps NaN
        return sums.index_add_(0, places, taken)


def _obstacle(source: Source, world: World) -> str | None:
    """Say why a gradient is not summed early, if so."""
    parameter = source.parameter
    if source.span is not None or not parameter.is_leaf or compat.is_fsdp1_flattened(parameter):
        return ON_PLAIN
    if not compat.is_dtensor(parameter) and world.size > 1:
        return ON_PLAIN
    kind = parameter.device.type
    if not watch.works_on(parameter.device):
        return ON_DEVICE.format(torch.__version__, kind)
    others = {kind if world.device is None else world.device.type}
    if compat.is_dtensor(parameter):
        others.add(compat.mesh_and_placements(parameter)[0].device_type)
    return None if others == {kind} else ON_OFFLOAD


class _Hook:
    """A hook that does not keep the clipper alive; a class, so that it is known again."""

    def __init__(self, overlap: weakref.ref[Overlap]) -> None:
        self._overlap = overlap

    def __call__(self, parameter: Tensor) -> None:
        overlap = self._overlap()
        if overlap is not None:
            overlap.observe(parameter)


def _has_hooks_of_others(parameter: Any) -> bool:
    """Whether somebody else's hook may have begun what is still changing this gradient.

    An asynchronous collective, say, which has taken the address before the watch begins.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return not all(isinstance(hook, _Hook) for hook in hooks.values())


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
