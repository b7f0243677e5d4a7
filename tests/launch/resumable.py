"""A loop of torch alone that stops and resumes, for tests that need many quick or slow steps.

`examples/train_lm.py` does the same for a real model. Here a step takes no time but `--pause`, so
a test can say when in the training something happens.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from shardclip.launch import StopSignal, init_distributed


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a rank's batch of a step; it depends on nothing else, so a resumed run sees it too."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 8, generator=random)
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


def average(model: torch.nn.Module, loss: torch.Tensor, flag: int) -> tuple[float, float]:
    """Average gradients and loss over the ranks; the stop flag travels in the same all-reduce."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    extra = torch.tensor([loss.item(), float(flag)])
    flat = torch.cat([g.flatten() for g in gradients] + [extra])
    dist.all_reduce(flat)
    *means, totals = torch.split(flat, [g.numel() for g in gradients] + [2])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient) / dist.get_world_size())
    return totals[0].item() / dist.get_world_size(), totals[1].item()


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, if there is one; returns the step after it."""
    latest = path / "latest"
    if not latest.exists():
        return 0
    # imported where it is used: this takes as long as importing torch
    from torch.distributed.checkpoint.state_dict_loader import (
        load as load_checkpoint,
    )

    step = int(latest.read_text())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    load_checkpoint(state, checkpoint_id=path / f"step-{step}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return step


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save a checkpoint, and only then name it as the latest."""
    from torch.distributed.checkpoint.state_dict_saver import (
        save as save_checkpoint,
    )

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save_checkpoint(state, checkpoint_id=path / f"step-{step}")
    if dist.get_rank() == 0:
        part = path / "latest.part"
        part.write_text(str(step))
        part.replace(path / "latest")
    dist.barrier()


def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0: only when stopped")
    parser.add_argument("--timeout", type=float, default=60.0, help="of a collective, in seconds")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()

    stop = StopSignal()
    place = init_distributed(timeout=options.timeout)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # momentum exists only after a step, and a checkpoint is loaded into what exists
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    options.checkpoint.mkdir(parents=True, exist_ok=True)
    first = load(options.checkpoint, model, optimizer)

    for step in range(first, options.steps):
        inputs, targets = batch(step, place.rank)
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        mean_loss, stops = average(model, loss, stop.flag)
        optimizer.step()
        if place.rank == 0:
            print(f"step {step} loss {mean_loss:.9f}", flush=True)
        if stops:
            save(options.checkpoint, step + 1, model, optimizer)
            stop.mark(step + 1)
            break
        if options.save_every and (step + 1) % options.save_every == 0:
            save(options.checkpoint, step + 1, model, optimizer)
        time.sleep(options.pause)
    else:
        if place.rank == 0:
            print("done", flush=True)
    dist.barrier()  # no rank takes its connections down while another still uses them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
