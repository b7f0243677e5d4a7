"""Lightning Fabric's loop: torchrun --nproc-per-node 2 examples/fabric_loop.py."""

import torch
from lightning.fabric import Fabric
from torch import nn

from shardclip.integrations.lightning import attach


def main() -> None:
    fabric = Fabric(accelerator="auto", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    clipping = attach(fabric, model)  # the one line

    fabric.seed_everything(fabric.global_rank)
    for inputs in torch.randn(4, 4, 8, device=fabric.device):
        fabric.backward(model(inputs).square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(clipping.result)


if __name__ == "__main__":
    main()
