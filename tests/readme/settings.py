"""What each README snippet finds around it: a small model of its kind, on real ranks."""

import atexit
import os
import shutil
import signal
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardclip


class Block(nn.Module):
    """A norm and two linear layers, steep enough for gradients above 1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return 100 * (model(batch) - 1).square().mean()


def _common(model: nn.Module) -> dict:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return {
        "torch": torch,
        "shardclip": shardclip,
        "GradClipper": shardclip.GradClipper,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "loss_of": loss_of,
        "batches": [torch.randn(4, 8) for _ in range(3)],
    }


def _seeded(make) -> nn.Module:
    torch.manual_seed(0)
    return make()


def fsdp2() -> dict:
    model = _seeded(lambda: nn.Sequential(Block(), Block()))
    for block in model:
        fully_shard(block)
    return _common(fully_shard(model))


def after_backward() -> dict:
    found = fsdp2()
    found["loss_of"](found["model"], found["batches"][0]).backward()
    return found


def hsdp() -> dict:
    return _common(_seeded(lambda: nn.Sequential(Block(), Block()))) | {
        "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        "fully_shard": fully_shard,
    }


def recorded() -> dict:
    """A clipper, a loop that uses it, and a folder for what it records."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    found = fsdp2()

    def train(clipper: shardclip.GradClipper) -> None:
        for batch in found["batches"]:
            loss_of(found["model"], batch).backward()
            clipper.clip_()
            found["optimizer"].zero_grad()

    clipper = shardclip.GradClipper(found["model"], max_norm=1.0)
    return found | {
        "clipper": clipper,
        "folder": folder,
        "rank": dist.get_rank(),
        "train": train,
    }


def ignored() -> dict:
    model = _seeded(lambda: nn.Sequential(Block(), Block()))
    left_out = list(model[0].norm.parameters())
    return _common(fully_shard(model, ignored_params=set(left_out))) | {
        "ignored_parameters": left_out
    }


def fsdp1() -> dict:
    model = _seeded(Block)
    return _common(FullyShardedDataParallel(model, device_id=torch.device("cpu")))


def ddp() -> dict:
    return _common(nn.parallel.DistributedDataParallel(_seeded(Block)))


def tensor_parallel() -> dict:
    found = _common(_seeded(Block))
    torch.manual_seed(dist.get_rank() // 2)  # tensor-parallel ranks see the same data
    return found | {
        "batches": [torch.randn(4, 8) for _ in range(3)],
        "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        "fully_shard": fully_shard,
        "parallelize_module": parallelize_module,
        "ColwiseParallel": ColwiseParallel,
        "RowwiseParallel": RowwiseParallel,
    }


def pipeline() -> dict:
    whole = _seeded(lambda: nn.ModuleDict({"0": Block(), "1": Block()}))
    rank = dist.get_rank()
    model = nn.ModuleDict({str(rank): whole[str(rank)]})
    stage = PipelineStage(whole[str(rank)], rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: 100 * (out - target).abs().sum())
    inputs = () if rank else (torch.ones(4, 8) * torch.arange(8),)
    return _common(model) | {
        "stage": model,
        "schedule": schedule,
        "inputs": inputs,
        "target": torch.zeros(4, 8) if rank else None,
    }


def experts() -> dict:
    model = nn.ModuleDict({"router": _seeded(lambda: nn.Linear(8, 2)), "expert": nn.Linear(8, 8)})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))

    def backward_and_average(model: nn.Module) -> None:
        for parameter in model["router"].parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        for parameter in model["expert"].parameters():  # another expert on each ep rank
            parameter.grad = torch.full_like(parameter, 3.0 + dist.get_rank() % 2)

    return _common(model) | {
        "mesh": mesh,
        "Replicate": Replicate,
        "Shard": Shard,
        "expert_parameters": set(model["expert"].parameters()),
        "backward_and_average": backward_and_average,
    }


def launched() -> dict:
    """Rank 1 gets notice at its second step."""
    model = _seeded(Block)

    def noticed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1 and batch is found["batches"][1]:
            os.kill(os.getpid(), signal.SIGUSR1)
        return loss_of(model, batch)

    found = _common(model) | {"loss_of": noticed}
    found["batches"] *= 10  # a signal takes its time
    return found | {"save": lambda step: sys.stdout.write(f"{dist.get_rank()} saved {step}\n")}


def gradients() -> dict:
    return {"shardclip": shardclip, "grads": [torch.tensor([3.0, 4.0]), None]}


def alone() -> dict:
    return {}
