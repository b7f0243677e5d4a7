"""Writes down what a rank sends; loaded into the ranks before they start, by its file's name.

It knows nothing of where the library's code lies: the plan and the gradients are found in the
frames that call `all_reduce`, as local variables of these names.
"""

import hashlib
import json
import os
import pickle
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from tests.ranks import worker

FOLDER = Path(os.environ["SHARDCLIP_REPLAY"])
COPY = ("slot", "ordinal", "holders", "index", "weight")


class Recorder:
    """One rank's record of one call: a line for each all-reduce of a plan."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []
        self._gradients: list[weakref.ref[torch.Tensor]] = []

    def sent(self, payload: torch.Tensor, plan: object, grads: object) -> None:
        self.settle()
        self.lines.append({"payload": digest(payload), "lanes": payload.numel(), **told(plan)})
        self._gradients = [weakref.ref(one) for one in grads if one is not None]

    def settle(self) -> None:
        """Note the gradients of the last step, which nobody changes any more."""
        if self.lines and self._gradients:
            alive = [one() for one in self._gradients]
            self.lines[-1]["gradients"] = [None if t is None else digest(t) for t in alive]
        self._gradients = []


def digest(tensor: torch.Tensor) -> str:
    """A name for a tensor's kind and bits."""
    local = getattr(tensor.detach(), "_local_tensor", tensor.detach())
    local = local.coalesce().values() if local.is_sparse else local
    local = torch.view_as_real(local) if local.is_complex() else local
    if type(local) is not torch.Tensor or local.device.type != "cpu":
        return f"{type(local).__name__} {tuple(local.shape)}"
    content = bytes(local.contiguous().reshape(-1).view(torch.uint8).tolist())
    head = f"{local.dtype} {tuple(local.shape)}".encode()
    return hashlib.sha256(head + content).hexdigest()[:24]


def told(plan: object) -> dict[str, object]:
    """A plan in plain values."""
    seats = [
        [
            seat.source.name,
            seat.position,
            seat.bucket,
            seat.part,
            seat.copy and [getattr(seat.copy, name) for name in COPY],
            seat.declared,
        ]
        for seat in plan.seats
    ]
    buckets = [[bucket.group, bucket.key, bucket.weight] for bucket in plan.buckets]
    return {"seats": seats, "buckets": buckets, "problems": plan.problems}


def frames() -> Iterator[FrameType]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


_under_way: list[Recorder] = []
_all_reduce = dist.all_reduce
_answer = worker.answer


def all_reduce(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
    if _under_way:
        for frame in frames():
            plan, grads = frame.f_locals.get("plan"), frame.f_locals.get("grads")
            if hasattr(plan, "seats") and grads is not None:
                _under_way[-1].sent(tensor, plan, grads)
                break
    return _all_reduce(tensor, *args, **kwargs)


def answer(request: bytes) -> bytes:
    _, name, args, kwargs = pickle.loads(request)
    _under_way.append(Recorder())
    try:
        return _answer(request)
    finally:
        recorder = _under_way.pop()
        recorder.settle()
        if recorder.lines:
            # Worlds are told apart by their size; a function that is called again gets a number.
            call = f"{dist.get_world_size()}-{name}-{args!r}-{kwargs!r}"
            _write(hashlib.sha256(call.encode()).hexdigest()[:24], call, recorder.lines)


def _write(key: str, call: str, lines: list[dict[str, object]]) -> None:
    number = 0
    while (path := FOLDER / f"{key}-{number}-{dist.get_rank()}.json").exists():
        number += 1
    path.write_text(json.dumps({"call": call, "lines": lines}))


dist.all_reduce = all_reduce
worker.answer = answer
