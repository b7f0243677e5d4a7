"""Tensor parallel + FSDP2: torchrun --nproc-per-node 4 examples/layouts/tensor_parallel.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardclip import GradClipper


def main() -> None:
    """Train for four steps; two ranks share each layer."""
    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2), nn.Tanh())
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}  # not the norm layer: two meshes
    parallelize_module(model.to(device), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    clipper = GradClipper(model, max_norm=0.5)

    torch.manual_seed(mesh.get_local_rank("dp"))  # tensor-parallel ranks see the same data
    for step in range(4):
        (model(torch.randn(4, 8, device=device)) - 1).square().mean().backward()
        result = clipper.step(optimizer)  # still one all-reduce
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: {result}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
