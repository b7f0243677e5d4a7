"""A script with all that the library does, for an environment with torch and nothing else."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from shardclip.launch import StopSignal, init_distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardclip
from shardclip.record.logging import JsonLines, TensorBoard
from shardclip.rules import adaptive

assert importlib.util.find_spec("numpy") is None
assert "launch" not in sys.modules


def model(ranks: int) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    if ranks > 1:
        fully_shard(made, mesh=init_device_mesh("cpu", (ranks,)))
    made(torch.ones(2, 6)).square().sum().mul(100).backward()
    return made


def functions(made: nn.Module) -> None:
    grads = [p.grad for p in made.parameters()]
    norm = float(shardclip.get_total_norm(grads))
    assert norm > 1
    assert float(shardclip.global_norm(grads)) == norm
    clipped, told = shardclip.clip_by_global_norm(grads, 1.0)
    assert float(told) == norm
    assert abs(float(shardclip.get_total_norm(clipped)) - 1) < 1e-5
    assert float(shardclip.clip_grad_norm_(made, norm / 2)) == norm
    assert float(shardclip.adaptive_clip_grad_(made)) > norm / 3
    shardclip.clip_grad_per_tensor_norm_(made, norm / 100)
    shardclip.clip_grad_value_(made, norm / 200)
    left = shardclip.get_total_norm(grads)
    assert 0 < float(left) < norm / 20
    shardclip.clip_grads_with_norm_(made, float(left) / 2, left)
    assert float(shardclip.get_total_norm(grads)) < 0.6 * float(left)


def clippers(made: nn.Module, file: Path, rank: int) -> None:
    for options in (
        {"norms": "parameter", "also": ("loss",), "check_replicas": True},
        {"exact": True, "norms": "module"},
        {"norm_type": float("inf")},
        {"nonfinite": "skip"},
    ):
        clipper = shardclip.GradClipper(made, 1.0, **options)
        if rank == 0:
            clipper.record.send_to(JsonLines(file))
        result = clipper.clip_(also={"loss": 1.0} if "also" in options else None)
        assert float(result.total_norm) > 0
        assert bool(result.norms) == ("norms" in options)
        clipper.load_state_dict(clipper.state_dict())
        clipper.record.close()
    shardclip.GradClipper(made, adaptive.AutoClip()).clip_()
    clipper = shardclip.GradClipper(made, 0.1)
    clipper.step(torch.optim.AdamW(made.parameters(), fused=True))
    if rank == 0:
        steps = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(steps) >= 4


def said(call) -> str:
    try:
        call()
    except (RuntimeError, ValueError, ImportError) as error:
        return str(error)
    return "nothing"


def errors(rank: int, ranks: int) -> None:
    """What is wrong on the last rank is told on all."""
    last = ranks - 1
    wrong = nn.Parameter(torch.ones(3))
    wrong.grad = torch.full((3,), float("nan" if rank == last else 1))
    clipper = shardclip.GradClipper([("wrong", wrong)], 1.0, nonfinite="raise")
    assert f"rank {last}" in said(clipper.clip_)
    if ranks > 1:
        wrong.grad = torch.full((3,), float(rank))
        assert "wrong" in said(lambda: shardclip.clip_grad_norm_([("wrong", wrong)], 1.0))
        settings = said(lambda: shardclip.GradClipper([("wrong", wrong)], 1.0, 1.0 + rank))
        assert f"norm_type= differs between ranks: 1.0 on rank 0; 2.0 on rank {last}" in settings
    assert "pip install" in said(lambda: TensorBoard("runs"))


def main() -> None:
    place = init_distributed()
    rank, ranks = place.rank, place.world_size
    with StopSignal() as stop:
        functions(model(ranks))
        clippers(model(ranks), Path(sys.argv[1]), rank)
        errors(rank, ranks)
        assert not stop.agree()
    dist.barrier()
    print(f"rank {rank} of {ranks} with {shardclip.__file__}", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's threads may abort a Python that ends: see tests/aborts.py


if __name__ == "__main__":
    main()
