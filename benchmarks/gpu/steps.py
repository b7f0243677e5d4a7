"""Checks of whole steps on a device: optimizers, loss scaling, hooks, host syncs, CUDA graphs."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.counting import as_on_a_device, counting
from shardclip import GradClipper

from .checks import (
    EXACT,
    NotHereError,
    Outcome,
    check,
    exact,
    expect,
    grads_of,
    near,
    parameters_of,
    run,
    tensors_of,
)

__all__ = ["Outcome", "run"]  # with the checks of this file behind those of sums and scaling

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


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
        expect(getattr(optimizer, name, None) is None, f"{name} is left on the optimizer")
    return [one.detach().clone() for one in model.parameters()]


@check("fused optimizers: step() gives what clip_() and step give")
def _fused(device: torch.device) -> str:
    def apart(clipper: GradClipper, optimizer: torch.optim.Optimizer) -> None:
        expect(clipper.clip_().clipped, "the step is not clipped")
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
    expect(worst <= 1e-5, f"{worst:.1e} apart")
    return f"{', '.join(names)}: at most {worst:.0e} apart"


@check('fused optimizers: nonfinite="skip" leaves parameters as they are')
def _skipping(device: torch.device) -> str:
    model = _model(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    clipper = GradClipper(model, 1.0, nonfinite="skip")
    _backward(model, device)
    before = [one.detach().clone() for one in model.parameters()]
    first = next(model.parameters())
    grads_of([first])[0].view(-1)[0] = math.nan
    result = clipper.step(optimizer)
    expect(bool(result.skipped), "it is not said to be skipped")
    after = list(model.parameters())
    expect(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "changed")
    return "unchanged"


@check("GradScaler: unscaled and clipped at once, overflow skipped")
def _scaler(device: torch.device) -> str:
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
    expect(worst <= 1e-5, f"{worst:.1e} apart from unscale_, clip, step")
    for one in grads_of(list(model.parameters())):
        one.fill_(math.inf)
    clipper.step(ours, grad_scaler=scalers[0])
    scalers[0].update()
    expect(scalers[0].get_scale() < scalers[1].get_scale(), "the scale did not go down")
    return f"at most {worst:.0e} apart"


@check("overlap=True: sums taken in the backward pass")
def _overlap(device: torch.device) -> str:
    settings: dict[str, Any] = {"overlap": True}
    model = _model(device)
    clipper = GradClipper(model, 0.05, **settings)
    worst = 0.0
    for seed in range(4):
        model.zero_grad()
        for micro in range(1 + seed % 2):  # every other step accumulates
            _backward(model, device, 10 * seed + micro)
        right = exact(grads_of(list(model.parameters())))
        found = float(clipper.clip_().total_norm)
        worst = max(worst, near(found, right, EXACT, f"step {seed}"))
    return f"at most {worst:.0e} off"


@check("start() and finish(), with other work in between")
def _asynchronous(device: torch.device) -> str:
    model = _model(device)
    clipper: Any = GradClipper(model, 0.05)
    worst = 0.0
    for seed in range(3):
        model.zero_grad()
        _backward(model, device, seed)
        grads = grads_of(list(model.parameters()))
        right = exact(grads)
        pending = clipper.start()
        torch.ones(1 << 16, device=device).sum()
        result = pending.finish()
        worst = max(worst, near(float(result.total_norm), right, EXACT, f"step {seed}"))
        worst = max(worst, near(exact(grads), 0.05, 1e-4, "norm after clipping"))
    return f"at most {worst:.0e} off"


@check("exact=True: the same bits whatever the order")
def _exact_sum(device: torch.device) -> str:
    settings: dict[str, Any] = {"exact": True}
    tensors = tensors_of(device, torch.float32)
    found = {
        float(GradClipper(parameters_of(order), None, **settings).clip_().clipped_norm)
        for order in (tensors, tensors[::-1])
    }
    expect(len(found) == 1, f"two orders give {sorted(found)}")
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
        expect(counts.host_reads == 0, f"{counts.host_reads} reads by the host")


@check("no host sync in clip_(), nor in step() with a fused optimizer")
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
            expect(math.isfinite(float(result.total_norm)), "the norm is not finite")
    return "clip_() and step()" if len(ways) > 1 else "clip_() alone, as on a device"


def _on_this_path(device: torch.device) -> Any:
    return nullcontext() if device.type == "cuda" else as_on_a_device()


@check("FSDP2 on this device, in a group of its own")
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
            right = exact(grads_of(list(twin.parameters())))
            error = near(float(clipper.clip_().total_norm), right, 1e-5, "norm")
        return f"{error:.0e} off"
    finally:
        dist.destroy_process_group()


@check("CUDA graph: clip_() captured once, replayed on other gradients")
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
            grads_of([parameter])[0].copy_(tensor * factor)
        graph.replay()
        torch.cuda.synchronize()
        near(float(result.total_norm), right * factor, EXACT, "norm")
        near(exact(grads_of(parameters)), right / 2, 1e-5, "norm after clipping")
    return "two replays"
