"""Training with uneven inputs: rank by rank another number of batches, inside a join."""

import copy
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import count_collectives
from .gather import everywhere
from .tensors import coefficient, exact_norm

BATCHES = (1, 3, 2)  # by rank: all are active, then two, then one


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The loss of a rank's batch."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(4, 3, generator=generator, dtype=torch.float64) + rank
    return model(batch.to(dtype)).square().mean()


def backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    loss_of(model, dist.get_rank(), step).backward()


def steps() -> range:
    """Those of this rank."""
    return range(BATCHES[dist.get_rank()])


def averaged(module: nn.Module, step: int, among: str = "all") -> list[Tensor | None]:
    """What DDP is to make of the active ranks' batches, in float64."""
    twin = copy.deepcopy(module).double()
    size = dist.get_world_size()
    active = [rank for rank in range(size) if step < BATCHES[rank]]
    parts = size if among == "all" else len(active)
    for rank in active:
        (loss_of(twin, rank, step, torch.float64) / parts).backward()
    return [one.grad for one in twin.parameters()]


def assert_clipped(
    parameters: Iterator[nn.Parameter], full: list[Tensor | None], norm: Tensor, max_norm: float
) -> None:
    """The norm and the gradients are those of clipping the unsharded ones."""
    total = exact_norm([one for one in full if one is not None])
    assert abs(float(norm) - total) <= 1e-5 * total, (norm, total)
    factor = coefficient(total, max_norm)
    assert factor < 1
    for one, grad in zip(parameters, full, strict=True):
        assert (one.grad is None) == (grad is None)
        if grad is not None:
            clipped = one.grad.double()
            torch.testing.assert_close(clipped, grad * factor, rtol=1e-4, atol=1e-7)


def train(
    model: nn.Module,
    clip: Callable[[float], Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    join: object = None,
    among: str = "all",
) -> None:
    """Clip each of this rank's steps to a quarter, and check it; nothing is sent for it."""
    norms = []
    with model.join() if join is None else join:
        for step in steps():
            backward(model, step)
            full = averaged(model.module, step, among)
            max_norm = exact_norm([one for one in full if one is not None]) / 4
            with count_collectives() as calls:
                norms.append(float(clip(max_norm)))
            assert calls == []
            assert_clipped(model.parameters(), full, norms[-1], max_norm)
            if optimizer is not None:
                optimizer.step()
    told = everywhere(norms)
    longest = max(told, key=len)
    assert len(min(told, key=len)) < len(longest)  # some rank had joined
    assert all(found == longest[: len(found)] for found in told), told
    for values in everywhere([one.tolist() for one in model.parameters()]):
        assert values == [one.tolist() for one in model.parameters()]  # as DDP leaves them
