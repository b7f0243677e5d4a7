"""DeepSpeed's loop, ZeRO stage 2: torchrun --nproc-per-node 2 examples/deepspeed_loop.py."""

import deepspeed
import torch
from torch import nn

from shardclip import GradClipper

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 2},
}


def main() -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)

    clipper = GradClipper.from_deepspeed(engine, max_norm=0.5)  # the one line

    torch.manual_seed(engine.global_rank)  # each rank its own data
    for step in range(8):
        inputs = torch.randn(4, 8, device=engine.device)
        engine.backward((engine(inputs) - 1).square().mean())
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()  # clips at the boundary
        if boundary and engine.global_rank == 0:
            print(f"step {step}: {clipper.result}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
