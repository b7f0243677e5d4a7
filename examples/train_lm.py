"""Train a small language model twice, without and with clipping, under FSDP2.

Start it with `make demo`, or with torchrun and any number of ranks:

    torchrun --standalone --nproc-per-node 4 examples/train_lm.py

Both runs start from the same weights and read the same batches at a learning rate that is hot
enough to hurt. The metrics go to `runs/demo/metrics.jsonl`, the picture to
`runs/demo/training.png`.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from lm_data import load_corpus, windows
from lm_model import ByteLM, Shape
from lm_report import Progress, Record, table, write_metrics
from plot_training import draw
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import shardclip

UNCLIPPED, CLIPPED = "unclipped", "clipped"
VALIDATION_WINDOWS = 32  # a rank
TOLERANCE = 1e-6  # of the norm, against the float64 norm of the gathered gradients


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults are the demo."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run")
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate, no warm-up")
    parser.add_argument("--max-norm", type=float, default=0.5, help="threshold of the clipped run")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank and micro-batch")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    parser.add_argument("--checks", type=int, default=5, help="norms checked in each run")
    parser.add_argument("--files", type=int, default=None, help="source files to read [all]")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where results go")
    return parser.parse_args(arguments)


def main() -> None:
    """Train both runs, then write the metrics, the picture and the table on rank 0."""
    args = parse_args()
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --standalone --nproc-per-node 4 examples/train_lm.py")
    device = join_group()
    first = dist.get_rank() == 0
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    training, held_out = load_corpus(args.files)
    if first:
        introduce(args, device, len(training))

    records: list[Record] = []
    validation: dict[str, float] = {}
    for run, max_norm in ((UNCLIPPED, math.inf), (CLIPPED, args.max_norm)):
        model = build_model(args.seed, device, mesh)
        clipper = shardclip.GradClipper(model, max_norm=max_norm, also=("loss",))
        records += train(run, model, clipper, draw_batches(training, args, device), args)
        validation[run] = validate(model, held_out, args, device)
    if first:
        finish(args, records, validation)
    dist.barrier()  # no rank takes its connections down while another still draws
    dist.destroy_process_group()


def join_group() -> torch.device:
    """Join torchrun's ranks: NCCL with one CUDA device a rank, else Gloo on the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def build_model(seed: int, device: torch.device, mesh: DeviceMesh) -> ByteLM:
    """Build the same model on every rank, then shard it: one group a block, one for the rest."""
    torch.manual_seed(seed)
    model = ByteLM(Shape()).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def draw_batches(
    text: Tensor, args: argparse.Namespace, device: torch.device
) -> Iterator[list[Tensor]]:
    """Yield this rank's micro-batches of every step.

    Every rank draws the whole batch from the same seed and keeps its own part, so both runs and
    all ranks agree on the data without sending any.
    """
    generator = torch.Generator().manual_seed(args.seed + 1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    count = ranks * args.accumulation * args.batch
    while True:
        drawn = windows(text, count, Shape.context, generator)
        yield list(drawn.chunk(ranks)[rank].to(device).chunk(args.accumulation))


def train(
    run: str,
    model: ByteLM,
    clipper: shardclip.GradClipper,
    batches: Iterator[list[Tensor]],
    args: argparse.Namespace,
) -> list[Record]:
    """Train for `args.steps` steps and return one record for each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    progress = Progress(run, args.steps, shown=dist.get_rank() == 0)
    spacing = max(1, args.steps // max(1, args.checks))
    records: list[Record] = []
    for step in range(args.steps):
        start = time.perf_counter()
        loss = backward(model, next(batches))
        expected = gathered_norm(model) if args.checks and step % spacing == 0 else None
        result = clipper.clip_(also={"loss": loss})
        optimizer.step()
        optimizer.zero_grad()
        record = {"run": run, "step": step, **summarise(result)}
        if expected is not None:
            record["norm_error"] = check(record["total_norm"], expected, step, progress)
        record["seconds"] = time.perf_counter() - start
        records.append(record)
        progress.update(record)
    progress.close()
    return records


def backward(model: ByteLM, micro_batches: list[Tensor]) -> Tensor:
    """Accumulate the gradients of a step and return this rank's mean loss.

    The gradients are reduced over the ranks once, with the last micro-batch.
    """
    total = torch.zeros((), device=micro_batches[0].device)
    for index, batch in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        cast(FSDPModule, model).set_requires_gradient_sync(last)
        loss = model(batch[:, :-1], batch[:, 1:]) / len(micro_batches)
        loss.backward()
        total += loss.detach()
    return total


def summarise(result: shardclip.ClipResult) -> Record:
    """Turn a step's result into plain numbers; the loss was summed over the ranks on the way."""
    return {
        "loss": result.sums["loss"] / dist.get_world_size(),
        "total_norm": float(result.total_norm),
        "clip_coef": float(result.clip_coef),
        "clipped_norm": float(result.clipped_norm),
        "clipped": bool(result.clipped),
    }


def gathered_norm(model: ByteLM) -> float:
    """Gather every gradient in full and take the norm of all of them in float64."""
    squares = 0.0
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        squares += parameter.grad.full_tensor().double().square().sum().item()
    return math.sqrt(squares)


def check(norm: float, expected: float, step: int, progress: Progress) -> float:
    """Say how far the norm is from the gathered one, and stop the run where that is too far."""
    if not math.isfinite(expected):
        return 0.0 if not math.isfinite(norm) else math.inf
    error = abs(norm - expected) / expected
    progress.note(
        f"          step {step + 1:>4}: norm {norm:.7g}, gathered in float64 {expected:.7g}"
        f", {error:.0e} off"
    )
    if error > TOLERANCE:
        raise RuntimeError(f"step {step + 1}: norm {norm!r} where {expected!r} is right")
    return error


def validate(model: ByteLM, text: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Return the mean loss on the same held-out windows in every run, over all ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(args.seed + 2)
    drawn = windows(text, VALIDATION_WINDOWS * ranks, Shape.context, generator)
    mine = drawn.chunk(ranks)[rank].to(device)
    with torch.no_grad():
        loss = model(mine[:, :-1], mine[:, 1:])
    dist.all_reduce(loss)
    return float(loss) / ranks


def introduce(args: argparse.Namespace, device: torch.device, characters: int) -> None:
    """Say what is about to run."""
    model = ByteLM(Shape())
    count = sum(parameter.numel() for parameter in model.parameters())
    sequences = args.batch * args.accumulation * dist.get_world_size()
    print(
        f"FSDP2 on {dist.get_world_size()} {device.type} ranks ({dist.get_backend()}): "
        f"{count / 1e3:.0f} thousand parameters,\n"
        f"{characters / 1e6:.1f} MB of Python's standard library, "
        f"{sequences} x {Shape.context} bytes a step,\n"
        f"AdamW at lr {args.lr:g} without warm-up; max_norm {args.max_norm:g}\n",
        flush=True,
    )


def finish(args: argparse.Namespace, records: list[Record], validation: dict[str, float]) -> None:
    """Write the metrics and the picture, and print the table."""
    args.out.mkdir(parents=True, exist_ok=True)
    write_metrics(args.out / "metrics.jsonl", records)
    draw(records, args.max_norm, args.out / "training.png")
    print(f"\n{table(records, args.max_norm, validation)}\n")
    print(f"metrics: {args.out / 'metrics.jsonl'}\npicture: {args.out / 'training.png'}")


if __name__ == "__main__":
    main()
