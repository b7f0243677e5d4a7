"""Accelerate's loop: torchrun --nproc-per-node 2 examples/accelerate_loop.py."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardclip.integrations.accelerate import attach


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    clipping = attach(accelerator, model)  # the one line

    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.print(clipping.result)
    accelerator.end_training()


if __name__ == "__main__":
    main()
