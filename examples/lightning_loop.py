"""Lightning's Trainer, under FSDP2: torchrun --nproc-per-node 2 examples/lightning_loop.py."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from shardclip.integrations.lightning import ShardclipCallback


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    pl.seed_everything(0)
    clip = ShardclipCallback(nonfinite="skip")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    chosen = {"accelerator": "auto", "devices": 2, "strategy": strategy, "max_epochs": 1}
    trainer = pl.Trainer(gradient_clip_val=0.1, callbacks=[clip], **chosen, **quiet)
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4))
    pl.utilities.rank_zero_info(f"{clip.clipping and clip.clipping.result}")


if __name__ == "__main__":
    main()
