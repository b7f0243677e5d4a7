"""Checks of sums and scaling on a device, against float64.

They run on CPU too, as far as the path is there; a path that is not there says so.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn

import shardclip
from shardclip import GradClipper, kernels

_SIZES = (1, 3, 255, 4096, 65_537, (1 << 20) + 7)
EXACT, _ROUNDED = 1e-6, {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


class NotHereError(Exception):
    """A check that cannot be made: this device or this shardclip lacks the path."""


@dataclass(frozen=True)
class Outcome:
    """A check's name, whether it passed (None: not made), and what was seen."""

    name: str
    passed: bool | None
    detail: str


Check = Callable[[torch.device], str]
_CHECKS: list[tuple[str, Check]] = []


def check(name: str) -> Callable[[Check], Check]:
    """Register a check: it returns what it saw, or raises."""

    def register(function: Check) -> Check:
        _CHECKS.append((name, function))
        return function

    return register


def run(device: torch.device, report: Callable[[Outcome], None]) -> list[Outcome]:
    """Make every check; one that fails does not keep the others from being made."""
    outcomes = []
    for name, check in _CHECKS:
        try:
            outcome = Outcome(name, True, check(device))
        except NotHereError as reason:
            outcome = Outcome(name, None, str(reason))
        except Exception as error:  # a failure is an outcome
            told = " ".join(str(error).split())[:300]
            outcome = Outcome(name, False, f"{type(error).__name__}: {told}")
        outcomes.append(outcome)
        report(outcome)
    return outcomes


def expect(holds: bool, what: str) -> None:
    """Raise unless it holds; an ``assert`` may be switched off."""
    if not holds:
        raise AssertionError(what)


def near(found: float, right: float, bound: float, what: str) -> float:
    """Return the relative error, if it is within the bound."""
    error = abs(found - right) / right if right else abs(found)
    expect(error <= bound, f"{what}: {found!r} where {right!r} is right, {error:.1e} off")
    return error


def tensors_of(device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """Make tensors of many sizes, every other one not aligned."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index, size in enumerate(_SIZES * 3):
        offset = index % 2
        values = torch.randn(size + offset, generator=generator, dtype=torch.float64) * scale
        made.append(values.to(dtype).to(device)[offset:])
    return made


def exact(tensors: Sequence[Tensor], p: float = 2.0) -> float:
    """Return the norm in float64, on the host."""
    flat = torch.cat([tensor.detach().double().cpu().reshape(-1) for tensor in tensors])
    return float(torch.linalg.vector_norm(flat, p))


def parameters_of(tensors: Sequence[Tensor]) -> list[nn.Parameter]:
    """Make parameters that have the tensors as gradients."""
    made = [nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(made, tensors, strict=True):
        parameter.grad = tensor.clone()
    return made


def grads_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """List the parameters' gradients."""
    return [one.grad for one in parameters if one.grad is not None]


@check("norm against float64: p = 0, 1, 2, 3, inf in every dtype")
def _norms(device: torch.device) -> str:
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensors = tensors_of(device, dtype)
        for p in (0.0, 1.0, 2.0, 3.0, math.inf):
            right = exact(tensors, p)
            if p == 0:
                right = sum(float(tensor.count_nonzero()) for tensor in tensors)
            planned = GradClipper(parameters_of(tensors), None, p)
            for found in (shardclip.get_total_norm(tensors, p), planned.clip_().total_norm):
                worst = max(worst, near(float(found), right, EXACT, f"{dtype}, p = {p}"))
    return f"at most {worst:.0e} off, by kernels.{_kernel(tensors)}"


def _kernel(tensors: Sequence[Tensor]) -> str:
    """Name the kernel that is chosen: a fallback should not go unnoticed."""
    kernel = kernels.build(tensors, [0] * len(tensors), 1)
    return type(kernel).__module__.rpartition(".")[2]


@check("norm at the ends of the range, and of many tensors")
def _range(device: torch.device) -> str:
    worst = 0.0
    for scale in (1e30, 1e-30):
        tensors = tensors_of(device, torch.float32, scale)
        found = float(shardclip.get_total_norm([t.double() for t in tensors]))
        worst = max(worst, near(found, exact(tensors), EXACT, f"at {scale}"))
        found = GradClipper(parameters_of(tensors), None).clip_().clipped_norm
        worst = max(worst, near(found, exact(tensors), EXACT, f"at {scale}, planned"))
    many = [torch.full((17,), 0.5, device=device) for _ in range(5000)]
    found = GradClipper(parameters_of(many), None).clip_().clipped_norm
    worst = max(worst, near(found, exact(many), EXACT, "5000 tensors"))
    return f"at most {worst:.0e} off"


@check("NaN and infinity anywhere are seen")
def _nonfinite(device: torch.device) -> str:
    for value in (math.nan, math.inf, -math.inf):
        for index in range(len(_SIZES)):
            tensors = tensors_of(device, torch.float32)
            tensors[index][-1] = value
            found = float(GradClipper(parameters_of(tensors), 1.0).clip_().total_norm)
            expect(not math.isfinite(found), f"{value} in tensor {index} gives {found}")
            expect(math.isnan(found) == math.isnan(value), f"{value} gives {found}")
    return f"{3 * len(_SIZES)} places"


@check("scaling: a clipped step, and none that need not clip")
def _scaling(device: torch.device) -> str:
    worst = 0.0
    for dtype, bound in _ROUNDED.items():
        tensors = tensors_of(device, dtype)
        parameters, right = parameters_of(tensors), exact(tensors)
        GradClipper(parameters, 2 * right).clip_()
        same = zip(grads_of(parameters), tensors, strict=True)
        expect(all(torch.equal(a, b) for a, b in same), f"{dtype}: changed without need")
        clipper = GradClipper(parameters, right / 2)
        for _ in range(2):  # the first step reads, those that follow do not
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.grad = tensor.clone()
            clipper.clip_()
            for grad, tensor in zip(grads_of(parameters), tensors, strict=True):
                least = torch.finfo(dtype).smallest_normal  # below it a number is coarser
                size = tensor.double().abs().clamp_min(least)
                off = float(((grad.double() - tensor.double() / 2).abs() / size).amax())
                worst = max(worst, off)
                expect(off <= bound, f"{dtype}: {off:.0e} off")
    return f"at most {worst:.0e} off, in units of the gradient"


@check("without Triton: the same by torch's foreach calls")
def _without_triton(device: torch.device) -> str:
    if device.type == "cpu":
        raise NotHereError("CPU has kernels of its own")
    with mock.patch.object(kernels, "available", return_value=False):
        return f"{_norms(device)}; scaled {_scaling(device)}"
