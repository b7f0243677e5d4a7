"""What each snippet of the docs finds around it: its framework on two ranks, a small model."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardclip import GradClipper
from tests.ranks.tensors import exact_norm, local_of
from tests.systems import loops

STEEP = 100
"""What losses are multiplied by, so that gradients are longer than the snippets' threshold."""


@dataclass(frozen=True)
class Setting:
    """Where a snippet runs.

    Attributes:
        names: What it finds.
        exact: The unsharded gradients in float64, of those that this rank holds its part.
        total: The norm of all of them.
        left: Returns this rank's gradients as the snippet has left them.
    """

    names: dict[str, Any]
    exact: dict[str, Tensor]
    total: float
    left: Callable[[], dict[str, Tensor]]


def left_of(named: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Return what tells gradients: a step of SGD at a rate of 1, or ``.grad`` if there was none."""
    before = {name: one.detach().clone() for name, one in named.items()}

    def left() -> dict[str, Tensor]:
        moved = {name: before[name] - one.detach() for name, one in named.items()}
        if any(one.any() for one in moved.values()):
            return moved
        return {name: one.grad for name, one in named.items()}

    return left


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return STEEP * loops.loss_of(model, batch)


def small(model: nn.Module, **names: Any) -> Setting:
    """A model of one's own, its optimizer and one batch a rank."""
    twin = loops.model()
    for rank in range(loops.RANKS):
        (loss_of(twin, loops.batch(rank, 0, 0)) / loops.RANKS).backward()
    exact = {name: one.grad for name, one in twin.named_parameters()}
    dtype = next(model.parameters()).dtype
    batch = loops.batch(dist.get_rank(), 0, 0).to(dtype)
    told = {
        "GradClipper": GradClipper,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "loss_of": loss_of,
        "batch": batch,
        "loader": [batch],
    }
    left = left_of(dict(model.named_parameters()))
    return Setting(told | names, exact, exact_norm(exact.values()), left)


@contextmanager
def accelerate() -> Iterator[Setting]:
    from accelerate import Accelerator, state

    rows = torch.cat([loops.batch(rank, 0, 0) for rank in range(loops.RANKS)])
    loader = DataLoader(rows, batch_size=len(rows) // loops.RANKS)
    try:
        yield small(loops.model(), accelerator=Accelerator(cpu=True), loader=loader)
    finally:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@contextmanager
def deepspeed() -> Iterator[Setting]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2},
    }
    yield small(loops.model().float(), deepspeed=deepspeed, config=config)


@contextmanager
def fabric() -> Iterator[Setting]:
    from lightning.fabric import Fabric, strategies

    made = Fabric(accelerator="cpu", devices=loops.RANKS, strategy=strategies.DDPStrategy())
    made.launch()
    yield small(loops.model(), fabric=made)


@contextmanager
def lightning() -> Iterator[Setting]:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = loops.model()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    def trainer(**told: Any) -> pl.Trainer:
        told |= {"accelerator": "cpu", "devices": loops.RANKS, "max_epochs": 1, "logger": False}
        quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        told |= dict.fromkeys((*quiet, "use_distributed_sampler"), False)
        return real(strategy=pl.strategies.DDPStrategy(), **told)

    real, module = pl.Trainer, Module()
    loader = DataLoader([loops.batch(dist.get_rank(), 0, 0)], batch_size=None)
    with mock.patch("lightning.pytorch.Trainer", trainer):
        yield small(module.model, module=module, loader=loader)


@contextmanager
def transformers() -> Iterator[Setting]:
    from accelerate import state
    from transformers import TrainingArguments

    from tests.systems.test_transformers import BATCH, dataset, llama

    rows = dataset()[: BATCH * loops.RANKS]  # one step: their order does not matter
    twin, ids = llama().double(), torch.stack([row["input_ids"] for row in rows])
    (STEEP * twin(input_ids=ids, labels=ids).loss).backward()
    exact = {name: one.grad for name, one in twin.named_parameters()}

    def arguments(folder: str, **told: Any) -> TrainingArguments:
        told |= {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "disable_tqdm": True}
        told |= {"max_steps": 1, "per_device_train_batch_size": BATCH, "save_strategy": "no"}
        told |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
        return TrainingArguments(folder, **told)

    model = llama()
    forward = model.forward

    @functools.wraps(forward)  # whose arguments the Trainer reads
    def steep(**inputs: Any) -> Any:
        found = forward(**inputs)
        found.loss = STEEP * found.loss
        return found

    model.forward = steep
    left = left_of(dict(model.named_parameters()))
    try:
        with mock.patch("transformers.TrainingArguments", arguments):
            names = {"model": model, "dataset": rows}
            yield Setting(names, exact, exact_norm(exact.values()), left)
    finally:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@contextmanager
def megatron() -> Iterator[Setting]:
    """Tensor parallel; the model once under Megatron's DDP, and once with ``.grad`` alone."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from tests.systems import megatron_model as made
    from tests.systems.megatron_on_cpu import megatron as on_cpu

    def backward(model: nn.Module) -> None:
        (STEEP * model(made.batch(0)).square().mean()).backward()

    def forward_backward(chunks: list[nn.Module]) -> None:
        chunks[0].zero_grad_buffer()
        backward(chunks[0])
        chunks[0].finish_grad_sync()

    def options(*_: Any, **told: Any) -> OptimizerConfig:
        return OptimizerConfig(optimizer="sgd", lr=1.0, sgd_momentum=0.0, weight_decay=0.0, **told)

    with on_cpu(tensor_model_parallel_size=loops.RANKS):
        config = made.config(torch.float32, tensor_model_parallel_size=loops.RANKS)
        net, bare = made.sharded(config), made.sharded(config)
        chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), net)
        backward(bare)
        both = dict(net.named_parameters()), dict(bare.named_parameters())
        whole = {name: STEEP * one for name, one in made.truth(1, torch.float32).items()}
        cut = {
            name: made.cut(name, one, dist.get_rank(), loops.RANKS) for name, one in whole.items()
        }
        used_chunks = left_of(both[0])
        names = {
            "GradClipper": GradClipper,
            "OptimizerConfig": options,
            "config": options(),
            "forward_backward": forward_backward,
            "get_megatron_optimizer": get_megatron_optimizer,
            "model": bare,
            "model_chunks": [chunk],
        }

        def left() -> dict[str, Tensor]:
            found = used_chunks()
            if found["norm.weight"] is not None:
                return found
            main = {name: one.main_grad for name, one in both[0].items()}
            return main if any(one.any() for one in main.values()) else left_of(both[1])()

        yield Setting(names, cut, exact_norm(whole.values()), left)


@contextmanager
def torchtitan() -> Iterator[Setting]:
    """Two pipeline stages."""
    from torchtitan.distributed import utils

    from tests.systems.test_torchtitan import full_gradients
    from tests.systems.torchtitan_on_cpu import Model

    model = Model(loops.RANKS, pp=loops.RANKS)
    model.backward()
    named = dict(model.named_parameters())
    for one in named.values():
        one.grad *= STEEP
    exact = {name: local_of(one.grad).double() for name, one in named.items()}
    names = {
        "dist_utils": utils,
        "max_norm": 1.0,
        "model_parts": model.parts,
        "parallel_dims": model.dims,
        "parameters": list(named.values()),
    }
    total = exact_norm(full_gradients(model).values())
    yield Setting(
        names, exact, total, lambda: {name: local_of(one.grad) for name, one in named.items()}
    )
