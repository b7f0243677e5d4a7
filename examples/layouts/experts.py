"""Experts: torchrun --nproc-per-node 2 examples/layouts/experts.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh

from shardclip import GradClipper


def main() -> None:
    """Train for four steps: a router on every rank, one expert a rank, an equal share of tokens."""
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (ranks,))
    torch.manual_seed(0)
    dense = nn.Linear(8, 8).to(device)
    torch.manual_seed(1 + rank)
    model = nn.ModuleDict({"dense": dense, f"experts_{rank}": nn.Linear(8, 8).to(device)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    clipper = GradClipper(model, max_norm=0.5)  # experts have names of their own on each rank

    for step in range(4):
        tokens = dense(torch.randn(4 * ranks, 8, device=device))
        sent = collectives.all_to_all_single_autograd(tokens, None, None, mesh)
        output = model[f"experts_{rank}"](sent)  # four tokens from each rank
        ((output - 3).square().mean() / ranks).backward()
        for parameter in dense.parameters():  # what has copies is summed over them
            dist.all_reduce(parameter.grad)
        result = clipper.step(optimizer)
        optimizer.zero_grad()
        print(f"rank {rank} step {step}: {result}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
