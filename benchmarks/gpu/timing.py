"""Times on one device, beside torch's on the same gradients."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import shardclip
from benchmarks.records import Row

_TURNS = 5
_WARM_UPS = 3
_GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """How many tensors of how many elements each."""

    name: str
    count: int
    elements: int


CASES = (
    Case("8 x 64 Mi", 8, 1 << 26),
    Case("1000 x 128 Ki", 1000, 1 << 17),
    Case("10,000 x 4 Ki", 10_000, 1 << 12),
)
DRY = (Case("2 x 64 Ki", 2, 1 << 16), Case("50 x 256", 50, 1 << 8))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Timed = Callable[[int], object]
"""Called with the number of the call: a step that is to clip must halve the norm anew each time."""


class Device:
    """Times on one device."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind)
        self.dry = kind != "cuda"

    def synchronize(self) -> None:
        """Wait for what was started."""
        if not self.dry:
            torch.cuda.synchronize()

    def times(self, ways: dict[str, Timed], calls: int) -> dict[str, float]:
        """Return each way's median seconds for one of several calls in a row, taken in turns."""
        number = dict.fromkeys(ways, 0)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(-_WARM_UPS, _TURNS):
            for name, way in ways.items():
                self.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    way(number[name])
                    number[name] += 1
                self.synchronize()
                if turn >= 0:
                    taken[name].append((time.perf_counter() - start) / calls)
        return {name: statistics.median(seconds) for name, seconds in taken.items()}

    def bandwidth(self) -> dict[str, float]:
        """Return bytes a second of a copy (read and written) and of a sum (read)."""
        elements = _GIB if not self.dry else 1 << 20
        source = torch.ones(elements, dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        size = source.numel() * source.element_size()
        taken = self.times(
            {"copy": lambda _: target.copy_(source), "read": lambda _: source.sum()}, 3
        )
        return {"copy": 2 * size / taken["copy"], "read": size / taken["read"]}


def time_case(device: Device, case: Case, dtype: str) -> list[Row]:
    """Time the norm, the usual step, the clipped step and the step with an optimizer."""
    grads = [
        torch.randn(case.elements, device=device.device).to(DTYPES[dtype])
        for _ in range(case.count)
    ]
    size = sum(grad.numel() * grad.element_size() for grad in grads)
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    made = []
    for what, (theirs, ours) in _ways(parameters, grads).items():
        taken = device.times({"torch": theirs, "ours": ours}, 2)
        made.append(
            {
                "kind": "gpu time",
                "case": case.name,
                "dtype": dtype,
                "what": what,
                "bytes": size,
                "torch_milliseconds": taken["torch"] * 1e3,
                "milliseconds": taken["ours"] * 1e3,
                "ratio": taken["ours"] / taken["torch"],
            }
        )
    return made


def _ways(
    parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]
) -> dict[str, tuple[Timed, Timed]]:
    """Pair what torch does with what this library does, kind of step by kind of step."""
    norm = float(shardclip.get_total_norm(grads))
    held = list(parameters)
    clipper = shardclip.GradClipper(held, 2 * norm)
    stepper = shardclip.GradClipper(held, 2 * norm)
    measurer = shardclip.GradClipper(held, None)
    theirs, ours = (torch.optim.AdamW(held, lr=1e-9, fused=True) for _ in range(2))
    torch_norm, torch_clip = torch.nn.utils.get_total_norm, torch.nn.utils.clip_grad_norm_

    def clip_to(max_norm: float) -> None:
        clipper.max_norm = max_norm
        clipper.clip_()

    def torch_step(_: int) -> None:
        torch_clip(held, 2 * norm)
        theirs.step()

    def halve(clip: Callable[[float], object]) -> Timed:
        """Clip to half of what the last call left; both sides start from what they find."""

        def call(number: int) -> None:
            if number % 8 == 0:
                torch._foreach_mul_(list(grads), 256.0)  # both pay for it alike
            clip(norm * 2.0 ** (7 - number % 8))

        return call

    return {
        "norm": (lambda _: torch_norm(grads), lambda _: measurer.clip_()),
        "function": (lambda _: torch_norm(grads), lambda _: shardclip.get_total_norm(grads)),
        "usual": (lambda _: torch_clip(held, 2 * norm), lambda _: clip_to(2 * norm)),
        "step": (torch_step, lambda _: stepper.step(ours)),
        "clipped": (halve(lambda limit: torch_clip(held, limit)), halve(clip_to)),
    }
