"""FSDP2: torchrun --nproc-per-node 2 examples/layouts/fsdp2.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardclip import GradClipper


def main() -> None:
    """Train a small model for four steps."""
    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    clipper = GradClipper(model, max_norm=0.5)  # once, after fully_shard

    torch.manual_seed(dist.get_rank())  # each rank its own data
    for step in range(4):
        inputs = torch.randn(4, 8, device=device)
        (model(inputs) - 1).square().mean().backward()
        result = clipper.step(optimizer)  # one all-reduce
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: {result}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
