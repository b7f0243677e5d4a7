"""Pipeline stages: torchrun --nproc-per-node 2 examples/layouts/pipeline.py."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from shardclip import GradClipper


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Compare what the last stage made with what it should be."""
    return (output - target).square().mean()


def main() -> None:
    """Train for four steps, one layer a rank."""
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(rank)
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)
    schedule = ScheduleGPipe(PipelineStage(layer, rank, ranks, device), 4, loss_fn=loss)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)

    named = ((f"layers.{rank}.{name}", p) for name, p in layer.named_parameters())
    clipper = GradClipper(named, max_norm=0.5)  # other names: other parameters, no copies

    for step in range(4):
        inputs = (torch.randn(8, 8, device=device),) if rank == 0 else ()
        schedule.step(*inputs, target=torch.ones(8, 8, device=device) * 3)
        result = clipper.step(optimizer)  # the norm over all stages
        optimizer.zero_grad()
        print(f"rank {rank} step {step}: {result}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
