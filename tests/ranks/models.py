"""Small models for the real sharding systems, and the gradients of their unsharded twins."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def mlp() -> nn.Sequential:
    """Uneven sizes (no dim is a multiple of four), nested, the same on every rank."""
    torch.manual_seed(7)
    inner = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
    return nn.Sequential(nn.Linear(3, 5), inner, nn.LayerNorm(7), nn.Linear(7, 2))


def loss_of(model: nn.Module, data_rank: int) -> Tensor:
    """The loss of the batch that this data-parallel rank sees."""
    generator = torch.Generator().manual_seed(data_rank)
    return model(torch.randn(4, 3, generator=generator) + data_rank).square().mean()


def unsharded_gradients(data_ranks: int, model: nn.Module | None = None) -> dict[str, Tensor]:
    """By name, of one process that sees every batch."""
    model = mlp() if model is None else model
    for rank in range(data_ranks):
        (loss_of(model, rank) / data_ranks).backward()
    return {name: one.grad for name, one in model.named_parameters()}


def average_(tensor: Tensor) -> None:
    """Synchronise a gradient that no framework reduces (Gloo has no average)."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()
