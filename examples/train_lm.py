"""Train a small language model twice, without and with clipping, under FSDP2.

Start it with `make demo`, or with any number of ranks on one host or many:

    shardclip-launch run -n 4 examples/train_lm.py
    shardclip-launch slurm -N 2 -n 4 examples/train_lm.py
    torchrun --standalone --nproc-per-node 4 examples/train_lm.py
    srun -N 2 --ntasks-per-node 4 python examples/train_lm.py
    python examples/train_lm.py

Both runs start from the same weights and read the same batches at a learning rate that is hot
enough to hurt. Every step's norms go to `runs/demo/unclipped.jsonl` and `clipped.jsonl`, which
`shardclip plot`, `report` and `suggest` read; a picture of both to `runs/demo/training.png`, the
report to `runs/demo/report.html`.

On a notice to stop (TERM or USR1 to any rank, or the launcher's stop file) all ranks end the same
step, save, and exit 0; started again, they go on at the next step with the same losses as a
training that was never stopped.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lm_checkpoint import Checkpoints, Progress
from lm_data import load_corpus, windows
from lm_model import ByteLM, Shape
from lm_report import ProgressBar, table
from plot_training import draw
from shardclip.launch import StopSignal, init_distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import shardclip
from shardclip.record.logging import JsonLines
from shardclip.record.run_file import read

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
    parser.add_argument("--checkpoint", type=Path, default=None, help="[OUT/checkpoint]")
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0: only when stopped")
    parser.add_argument("--timeout", type=float, default=600, help="of a collective, in seconds")
    args = parser.parse_args(arguments)
    args.checkpoint = args.checkpoint or args.out / "checkpoint"
    return args


@dataclass
class Trainee:
    """What one run trains."""

    model: ByteLM
    optimizer: torch.optim.AdamW
    clipper: shardclip.GradClipper


def main() -> None:
    """Train both runs, then write the picture, the report and the table on rank 0."""
    args = parse_args()
    stop = StopSignal()
    place = init_distributed(timeout=args.timeout)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mesh = init_device_mesh(device.type, (place.world_size,), mesh_dim_names=("dp",))
    training, held_out = load_corpus(args.files)
    if place.rank == 0:
        introduce(args, device, len(training))

    checkpoints = Checkpoints(args.checkpoint, settings(args, place.world_size, len(training)))
    progress = checkpoints.progress() or Progress(UNCLIPPED)
    for run, max_norm in ((UNCLIPPED, math.inf), (CLIPPED, args.max_norm)):
        if run in progress.validation:
            continue  # done before the training was stopped
        trainee = build(args, max_norm, device, mesh)
        if progress.run != run:
            progress.run, progress.step = run, 0
        elif progress.step:
            checkpoints.load(trainee.model, trainee.optimizer, trainee.clipper)
        if place.rank == 0:
            keep_record(trainee.clipper, progress, args)
        batches = islice(draw_batches(training, args, device), progress.step, None)
        if train(trainee, progress, batches, args, stop, checkpoints):
            break
        trainee.clipper.record.close()
        progress.validation[run] = validate(trainee.model, held_out, args, device)
    else:
        if place.rank == 0:
            finish(args, progress)
        checkpoints.clear()
    dist.barrier()  # no rank takes its connections down while another still draws
    dist.destroy_process_group()


def settings(args: argparse.Namespace, ranks: int, characters: int) -> dict[str, Any]:
    """Return what decides the losses: with other values it is another training."""
    names = ("steps", "lr", "max_norm", "batch", "accumulation", "seed")
    return {name: getattr(args, name) for name in names} | {"ranks": ranks, "text": characters}


def build(
    args: argparse.Namespace, max_norm: float, device: torch.device, mesh: DeviceMesh
) -> Trainee:
    """Build what a run starts from, the same for both but for the threshold."""
    model = build_model(args.seed, device, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    clipper = shardclip.GradClipper(model, max_norm=max_norm, norms="module", also=("loss", "stop"))
    return Trainee(model, optimizer, clipper)


def keep_record(
    clipper: shardclip.GradClipper, progress: Progress, args: argparse.Namespace
) -> None:
    """Write every step of a run to its file; one that goes on continues the file."""
    path = run_path(args, progress.run)
    if not progress.step:
        path.unlink(missing_ok=True)  # an earlier training's
    meta = {"ranks": dist.get_world_size(), "lr": args.lr}
    clipper.record.send_to(JsonLines(path, meta=meta))


def run_path(args: argparse.Namespace, run: str) -> Path:
    """Return where a run's steps are written."""
    return Path(args.out) / f"{run}.jsonl"


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
    trainee: Trainee,
    progress: Progress,
    batches: Iterator[list[Tensor]],
    args: argparse.Namespace,
    stop: StopSignal,
    checkpoints: Checkpoints,
) -> bool:
    """Train what is left of `args.steps` steps; returns True if stopped before or at the last.

    The notice to stop travels in the clipper's own all-reduce, so all ranks stop at one step.
    """
    model, optimizer, clipper = trainee.model, trainee.optimizer, trainee.clipper
    bar = ProgressBar(progress.run, args.steps, progress.step, shown=dist.get_rank() == 0)
    stopped = False
    while progress.step < args.steps and not stopped:
        loss = backward(model, next(batches))
        expected = gathered_norm(model) if is_checked(progress.step, args) else None
        result = clipper.clip_(also={"loss": loss, "stop": stop.flag})
        optimizer.step()
        optimizer.zero_grad()
        if expected is not None:
            error = check(float(result.total_norm), expected, progress.step, bar)
            progress.errors[progress.run] = max(error, progress.errors.get(progress.run, 0.0))
        progress.step += 1
        sums = result.sums
        bar.update(result.outcome, sums["loss"] / dist.get_world_size())
        stopped = sums["stop"] > 0
        if stopped or (args.save_every and progress.step % args.save_every == 0):
            clipper.record.flush()  # no step is in the checkpoint and not in the file
            checkpoints.save(progress, model, optimizer, clipper)
    if stopped:
        # of both runs; the batch script tells it
        stop.mark(len(progress.validation) * args.steps + progress.step)
        bar.note(f"stopped after step {progress.step}; the same command goes on from there")
    bar.close()
    return stopped


def is_checked(step: int, args: argparse.Namespace) -> bool:
    """Tell whether the norm of this step is compared with the gathered one."""
    spacing = max(1, args.steps // max(1, args.checks))
    return bool(args.checks) and step % spacing == 0


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


def gathered_norm(model: ByteLM) -> float:
    """Gather every gradient in full and take the norm of all of them in float64."""
    squares = 0.0
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        squares += parameter.grad.full_tensor().double().square().sum().item()
    return math.sqrt(squares)


def check(norm: float, expected: float, step: int, bar: ProgressBar) -> float:
    """Say how far the norm is from the gathered one, and stop the run where that is too far."""
    if not math.isfinite(expected):
        return 0.0 if not math.isfinite(norm) else math.inf
    error = abs(norm - expected) / expected
    bar.note(
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


def finish(args: argparse.Namespace, progress: Progress) -> None:
    """Draw the picture, write the report, and print the table."""
    from shardclip.pictures import report  # noqa: PLC0415  only the rank that draws pays for it

    paths = [run_path(args, run) for run in progress.validation]
    runs = [read(path) for path in paths]
    picture, page = args.out / "training.png", args.out / "report.html"
    draw(runs, args.max_norm, picture)
    page.write_text(report.page(runs), encoding="utf-8")
    print(f"\n{table(runs, args.max_norm, progress.validation, progress.errors)}\n")
    for path in paths:
        print(f"steps: {path}")
    print(f"report: {page}\npicture: {picture}")


if __name__ == "__main__":
    main()
