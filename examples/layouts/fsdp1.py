"""FSDP1: torchrun --nproc-per-node 2 examples/layouts/fsdp1.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardclip import GradClipper


def main() -> None:
    """Train a small model for four steps."""
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model = FullyShardedDataParallel(net, device_id=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    clipper = GradClipper(model, max_norm=0.5)  # the module: its flat parameters alone do not tell

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
