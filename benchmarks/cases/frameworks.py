"""Layouts that only their framework can build: FSDP1's flat parameters, ZeRO-2's partitions."""

import importlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from .case import Case
from .gradients import Gradients, UnavailableError, true_norm
from .shapes import Block


class Bag(nn.Module):
    """Parameters whose gradients are given: the loss is linear in each."""

    def __init__(self, block: Block, generator: torch.Generator) -> None:
        super().__init__()
        self.held = nn.ParameterList(torch.zeros(shape) for shape in block)
        self.wanted = [torch.randn(shape, generator=generator) for shape in block]

    def forward(self) -> Tensor:
        """Return the block's part of the loss."""
        parts = [(one * wanted).sum() for one, wanted in zip(self.held, self.wanted, strict=True)]
        return torch.stack(parts).sum()


class Bags(nn.ModuleList):
    """All blocks."""

    def forward(self) -> Tensor:
        """Return the loss."""
        return torch.stack([bag() for bag in self]).sum()


def build(case: Case, seed: int) -> Gradients:
    """Build the layout with its framework; every rank must call."""
    generator = torch.Generator().manual_seed(seed)
    bags = Bags(Bag(block, generator) for block in case.shapes.blocks)
    return _fsdp1(case, bags) if case.layout == "fsdp1" else _zero2(case, bags)


def _fsdp1(case: Case, bags: Bags) -> Gradients:
    options: dict[str, Any] = {"device_id": torch.device("cpu")}
    for index, bag in enumerate(bags):
        bags[index] = FullyShardedDataParallel(bag, **options)
    model = FullyShardedDataParallel(bags, **options)
    model().backward()
    parameters = [one for one in model.parameters() if one.grad is not None]
    grads = [one.grad for one in parameters if one.grad is not None]
    saved = [grad.detach().clone() for grad in grads]

    def attach() -> None:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad

    norm = true_norm(saved, [1] * len(saved))
    return Gradients(case, model, parameters, grads, saved, norm, attach)


def _zero2(case: Case, bags: Bags) -> Gradients:
    optimizer: Any
    try:
        engine, optimizer = _deepspeed(bags)
    except ImportError as error:
        raise UnavailableError(f"{error}: pip install -e .[bench]") from error
    except Exception as error:  # no compiler for its extension, or a version that differs
        raise UnavailableError(f"deepspeed: {type(error).__name__}: {error}") from error
    engine.backward(engine())
    partitions: list[Tensor] = list(optimizer.averaged_gradients[0])
    norm = true_norm(partitions, [1] * len(partitions))
    saved = [partition.clone() for partition in partitions]
    parameters = list(bags.parameters())
    return Gradients(
        case, partitions, parameters, partitions, saved, norm, lambda: None, engine=optimizer
    )


def _deepspeed(bags: Bags) -> tuple[Any, Any]:
    """Start an engine on the group that is there already; it wants a launcher's variables."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.init_distributed("gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=bags, model_parameters=list(bags.parameters()), config=config
    )
    return engine, optimizer
