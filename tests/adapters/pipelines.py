"""Pipelines of real schedules: stages under FSDP2 and TP, and their unsharded twin."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
MICRO_BATCHES = 4


class Block(nn.Module):
    """A residual block; its norm stays outside the tensor-parallel plan."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def blocks(count: int) -> nn.ModuleDict:
    """The unsharded model: the stages one after another, all different."""
    torch.manual_seed(5)
    return nn.ModuleDict({str(index): Block() for index in range(count)})


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch(data_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(data_rank)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def truth(model: nn.ModuleDict, data_ranks: int) -> dict[str, Tensor]:
    """float64 gradients of one process that runs all stages on every batch."""
    twin = model.double()
    for rank in range(data_ranks):
        output, target = batch(rank)
        output = output.double()
        for stage in twin.values():
            output = stage(output)
        (loss(output, target.double()) / data_ranks).backward()
    found = {name: one.grad.clone() for name, one in twin.named_parameters()}
    twin.zero_grad()
    model.float()
    return found


def sharded(mesh, stage: nn.Module) -> nn.Module:
    """Put a stage under TP and FSDP2, as far as the mesh has these axes."""
    if "tp" in mesh.mesh_dim_names:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(stage, mesh["tp"], plan)
    if "dp" in mesh.mesh_dim_names:
        fully_shard(stage, mesh=mesh["dp"])
    return stage


def run(mesh, model: nn.ModuleDict, schedule: str) -> nn.ModuleDict:
    """Send this data rank's batch through the pipeline; this rank's stages, with gradients."""
    count, ranks = len(model), mesh["pp"].size()
    mine = {i: sharded(mesh, model[str(i)]) for i in range(mesh.get_local_rank("pp"), count, ranks)}
    group = mesh.get_group("pp")
    stages = [
        PipelineStage(stage, i, count, torch.device("cpu"), group=group)
        for i, stage in mine.items()
    ]
    made = SCHEDULES[schedule](
        stages if len(stages) > 1 else stages[0], MICRO_BATCHES, loss_fn=loss
    )
    inputs, target = batch(mesh.get_local_rank("dp") if "dp" in mesh.mesh_dim_names else 0)
    made.step(
        *((inputs,) if 0 in mine else ()), **({"target": target} if count - 1 in mine else {})
    )
    return nn.ModuleDict({str(i): stage for i, stage in mine.items()})


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
