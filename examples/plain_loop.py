"""A loop of one's own, under FSDP2: torchrun --nproc-per-node 2 examples/plain_loop.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardclip import GradClipper

ACCUMULATE = 2


def main() -> None:
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    sharded = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    clipper = GradClipper(model, max_norm=0.5, nonfinite="skip")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        for micro in range(ACCUMULATE):
            sharded.set_requires_gradient_sync(micro == ACCUMULATE - 1)
            inputs = torch.randn(4, 8, generator=generator).to(device)
            (model(inputs).square().mean() / ACCUMULATE).backward()
        result = clipper.step(optimizer)
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: {result}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
