"""Checks of every path that a device takes, each against float64 or against clip and step.

They run on CPU too, as far as the path is there; a path that is not there says so.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardclip
from shardclip import GradClipper

from .counting import counting
from .device_path import as_on_a_device

_SIZES = (1, 3, 255, 4096, 65_537, (1 << 20) + 7)
_EXACT, _ROUNDED = 1e-6, {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


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


def _check(name: str) -> Callable[[Check], Check]:
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


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _near(found: float, right: float, bound: float, what: str) -> float:
    """Return the relative error, if it is within the bound."""
    error = abs(found - right) / right if right else abs(found)
    _expect(error <= bound, f"{what}: {found!r} where {right!r} is right, {error:.1e} off")
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


def _grads(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [one.grad for one in parameters if one.grad is not None]


@_check("norm against float64: p = 0, 1, 2, 3, inf in every dtype")
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
                worst = max(worst, _near(float(found), right, _EXACT, f"{dtype}, p = {p}"))
    return f"at most {worst:.0e} off"


@_check("norm at the ends of the range, and of many tensors")
def _range(device: torch.device) -> str:
    worst = 0.0
    for scale in (1e30, 1e-30):
        tensors = tensors_of(device, torch.float32, scale)
        found = float(shardclip.get_total_norm([t.double() for t in tensors]))
        worst = max(worst, _near(found, exact(tensors), _EXACT, f"at {scale}"))
        found = GradClipper(parameters_of(tensors), None).clip_().clipped_norm
        worst = max(worst, _near(found, exact(tensors), _EXACT, f"at {scale}, planned"))
    many = [torch.full((17,), 0.5, device=device) for _ in range(5000)]
    found = GradClipper(parameters_of(many), None).clip_().clipped_norm
    worst = max(worst, _near(found, exact(many), _EXACT, "5000 tensors"))
    return f"at most {worst:.0e} off"


@_check("NaN and infinity anywhere are seen")
def _nonfinite(device: torch.device) -> str:
    for value in (math.nan, math.inf, -math.inf):
        for index in range(len(_SIZES)):
            tensors = tensors_of(device, torch.float32)
            tensors[index][-1] = value
            found = float(GradClipper(parameters_of(tensors), 1.0).clip_().total_norm)
            _expect(not math.isfinite(found), f"{value} in tensor {index} gives {found}")
            _expect(math.isnan(found) == math.isnan(value), f"{value} gives {found}")
    return f"{3 * len(_SIZES)} places"


@_check("scaling: a clipped step, and none that need not clip")
def _scaling(device: torch.device) -> str:
    worst = 0.0
    for dtype, bound in _ROUNDED.items():
        tensors = tensors_of(device, dtype)
        parameters, right = parameters_of(tensors), exact(tensors)
        GradClipper(parameters, 2 * right).clip_()
        same = zip(_grads(parameters), tensors, strict=True)
        _expect(all(torch.equal(a, b) for a, b in same), f"{dtype}: changed without need")
        clipper = GradClipper(parameters, right / 2)
        for _ in range(2):  # the first step reads, those that follow do not
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.grad = tensor.clone()
            clipper.clip_()
            for grad, tensor in zip(_grads(parameters), tensors, strict=True):
                least = torch.finfo(dtype).smallest_normal  # below it a number is coarser
                size = tensor.double().abs().clamp_min(least)
                off = float(((grad.double() - tensor.double() / 2).abs() / size).amax())
                worst = max(worst, off)
                _expect(off <= bound, f"{dtype}: {off:.0e} off")
    return f"at most {worst:.0e} off, in units of the gradient"


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 16)).to(device)


def _backward(model: nn.Module, device: torch.device, seed: int = 0, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(32, 64, generator=generator).to(device)
    (model(batch).square().mean() * scale).backward()


def _steps(device: torch.device, kind: Any, step: Callable[..., Any]) -> list[Tensor]:
    """Train a few steps and return the parameters."""
    model = _model(device)
    optimizer = kind(model.parameters(), lr=1e-2, fused=True)
    clipper = GradClipper(model, 0.05)
    for seed in range(4):
        optimizer.zero_grad()
        _backward(model, device, seed)
        step(clipper, optimizer)
    for name in ("grad_scale", "found_inf"):
        _expect(getattr(optimizer, name, None) is None, f"{name} is left on the optimizer")
    return [one.detach().clone() for one in model.parameters()]


@_check("fused optimizers: step() gives what clip_() and step give")
def _fused(device: torch.device) -> str:
    def apart(clipper: GradClipper, optimizer: torch.optim.Optimizer) -> None:
        _expect(clipper.clip_().clipped, "the step is not clipped")
        optimizer.step()

    names, worst = [], 0.0
    for kind in _FUSED:
        try:
            kind([nn.Parameter(torch.zeros(1, device=device))], fused=True)
        except RuntimeError:  # torch has no fused one for this device
            continue
        right = _steps(device, kind, apart)
        found = _steps(device, kind, lambda clipper, optimizer: clipper.step(optimizer))
        for a, b in zip(found, right, strict=True):
            worst = max(worst, float((a - b).abs().amax()))
        names.append(kind.__name__)
    _expect(worst <= 1e-5, f"{worst:.1e} apart")
    return f"{', '.join(names)}: at most {worst:.0e} apart"


@_check('fused optimizers: nonfinite="skip" leaves parameters as they are')
def _skipping(device: torch.device) -> str:
    model = _model(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    clipper = GradClipper(model, 1.0, nonfinite="skip")
    _backward(model, device)
    before = [one.detach().clone() for one in model.parameters()]
    first = next(model.parameters())
    _grads([first])[0].view(-1)[0] = math.nan
    result = clipper.step(optimizer)
    _expect(bool(result.skipped), "it is not said to be skipped")
    after = list(model.parameters())
    _expect(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "changed")
    return "unchanged"


@_check("GradScaler: unscaled and clipped at once, overflow skipped")
def _scaler(device: torch.device) -> str:
    if "grad_scaler" not in inspect.signature(GradClipper.step).parameters:
        raise NotHereError("this shardclip's step() takes no grad_scaler")
    model, twin = _model(device), _model(device)
    ours, theirs = (torch.optim.AdamW(m.parameters(), fused=True) for m in (model, twin))
    scalers = [torch.amp.GradScaler(device.type, init_scale=1024.0) for _ in range(2)]
    clipper: Any = GradClipper(model, 0.05)
    for seed in range(3):
        for m, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            _backward(m, device, seed, 1024.0)
        for scaler in scalers:
            scaler.scale(torch.ones((), device=device))  # makes its state
        clipper.step(ours, grad_scaler=scalers[0])
        scalers[0].update()
        scalers[1].unscale_(theirs)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        scalers[1].step(theirs)
        scalers[1].update()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    worst = max(float((a - b).abs().amax().detach()) for a, b in pairs)
    _expect(worst <= 1e-5, f"{worst:.1e} apart from unscale_, clip, step")
    for one in _grads(list(model.parameters())):
        one.fill_(math.inf)
    clipper.step(ours, grad_scaler=scalers[0])
    scalers[0].update()
    _expect(scalers[0].get_scale() < scalers[1].get_scale(), "the scale did not go down")
    return f"at most {worst:.0e} apart"


@_check("overlap=True: sums taken in the backward pass")
def _overlap(device: torch.device) -> str:
    if "overlap" not in inspect.signature(GradClipper).parameters:
        raise NotHereError("this shardclip's GradClipper has no overlap")
    settings: dict[str, Any] = {"overlap": True}
    model = _model(device)
    clipper = GradClipper(model, 0.05, **settings)
    worst = 0.0
    for seed in range(4):
        model.zero_grad()
        for micro in range(1 + seed % 2):  # every other step accumulates
            _backward(model, device, 10 * seed + micro)
        right = exact(_grads(list(model.parameters())))
        found = float(clipper.clip_().total_norm)
        worst = max(worst, _near(found, right, _EXACT, f"step {seed}"))
    return f"at most {worst:.0e} off"


@_check("start() and finish(), with other work in between")
def _asynchronous(device: torch.device) -> str:
    if not hasattr(GradClipper, "start"):
        raise NotHereError("this shardclip's GradClipper has no start")
    model = _model(device)
    clipper: Any = GradClipper(model, 0.05)
    worst = 0.0
    for seed in range(3):
        model.zero_grad()
        _backward(model, device, seed)
        grads = _grads(list(model.parameters()))
        right = exact(grads)
        pending = clipper.start()
        torch.ones(1 << 16, device=device).sum()
        result = pending.finish()
        worst = max(worst, _near(float(result.total_norm), right, _EXACT, f"step {seed}"))
        worst = max(worst, _near(exact(grads), 0.05, 1e-4, "norm after clipping"))
    return f"at most {worst:.0e} off"


@_check("exact=True: the same bits whatever the order")
def _exact_sum(device: torch.device) -> str:
    if "exact" not in inspect.signature(GradClipper).parameters:
        raise NotHereError("this shardclip's GradClipper has no exact")
    settings: dict[str, Any] = {"exact": True}
    tensors = tensors_of(device, torch.float32)
    found = {
        float(GradClipper(parameters_of(order), None, **settings).clip_().clipped_norm)
        for order in (tensors, tensors[::-1])
    }
    _expect(len(found) == 1, f"two orders give {sorted(found)}")
    return "two orders"


@contextmanager
def _no_syncs(device: torch.device) -> Iterator[None]:
    """Raise where the host waits for the device; on CPU, where it would."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        with counting() as counts:
            yield
        _expect(counts.host_reads == 0, f"{counts.host_reads} reads by the host")


@_check("no host sync in clip_(), nor in step() with a fused optimizer")
def _syncs(device: torch.device) -> str:
    model = _model(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    clipper = GradClipper(model, 0.05)
    ways: list[Callable[[], Any]] = [clipper.clip_]
    if device.type == "cuda":  # on CPU a fused step reads, which is free there
        ways.append(lambda: clipper.step(optimizer))
    with _on_this_path(device):
        _backward(model, device)
        clipper.step(optimizer)  # the first step may read
        for seed, way in enumerate(ways * 2):
            optimizer.zero_grad(set_to_none=False)
            _backward(model, device, seed)
            with _no_syncs(device):
                result = way()
            _expect(math.isfinite(float(result.total_norm)), "the norm is not finite")
    return "clip_() and step()" if len(ways) > 1 else "clip_() alone, as on a device"


def _on_this_path(device: torch.device) -> Any:
    return nullcontext() if device.type == "cuda" else as_on_a_device()


@_check("FSDP2 on this device, in a group of its own")
def _fsdp2(device: torch.device) -> str:
    store: Any = torch._C._distributed_c10d.HashStore()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1,))
        model = _model(device)
        twin = _model(device)
        fully_shard(model, mesh=mesh)
        clipper = GradClipper(model, 0.05)
        for seed in range(2):
            for one in (model, twin):
                one.zero_grad()
                _backward(one, device, seed)
            right = exact(_grads(list(twin.parameters())))
            error = _near(float(clipper.clip_().total_norm), right, 1e-5, "norm")
        return f"{error:.0e} off"
    finally:
        dist.destroy_process_group()


@_check("CUDA graph: clip_() captured once, replayed on other gradients")
def _graph(device: torch.device) -> str:
    # The last check: a capture that fails may leave the device unusable.
    if device.type != "cuda":
        raise NotHereError("needs CUDA")
    tensors = tensors_of(device, torch.float32)
    parameters, right = parameters_of(tensors), exact(tensors)
    clipper = GradClipper(parameters, right / 2)
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            clipper.clip_()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = clipper.clip_()
    for factor in (1.0, 3.0):
        for parameter, tensor in zip(parameters, tensors, strict=True):
            _grads([parameter])[0].copy_(tensor * factor)
        graph.replay()
        torch.cuda.synchronize()
        _near(float(result.total_norm), right * factor, _EXACT, "norm")
        _near(exact(_grads(parameters)), right / 2, 1e-5, "norm after clipping")
    return "two replays"
