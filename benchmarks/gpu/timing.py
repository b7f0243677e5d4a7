"""One script for one GPU and four minutes: check every path of a device, then time it.

`python -m benchmarks.gpu` needs torch with CUDA and nothing else; `--device cpu` runs it dry, on
small sizes, as far as the paths are there. Rows are added to a file, and a table is printed. The
exit code is 1 where a check failed.
"""

import argparse
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import shardclip
from benchmarks import records
from benchmarks.records import Row

from .steps import Outcome, run

_TURNS = 5
_WARM_UPS = 3
_GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """How many tensors of how many elements each."""

    name: str
    count: int
    elements: int


CASES = (
    Case("8 x 64 Mi", 8, 1 << 26),
    Case("1000 x 128 Ki", 1000, 1 << 17),
    Case("10,000 x 4 Ki", 10_000, 1 << 12),
)
_DRY = (Case("2 x 64 Ki", 2, 1 << 16), Case("50 x 256", 50, 1 << 8))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

SPEED, USUAL = 0.85, 0.4
"""To reach on an H200: the norm's share of the best bandwidth measured, on the large tensors, and
the usual step's ratio to torch's."""

Timed = Callable[[int], object]
"""Called with the number of the call: a step that is to clip must halve the norm anew each time."""


class Device:
    """Times on one device."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind)
        self.dry = kind != "cuda"

    def synchronize(self) -> None:
        """Wait for what was started."""
        if not self.dry:
            torch.cuda.synchronize()

    def times(self, ways: dict[str, Timed], calls: int) -> dict[str, float]:
        """Return each way's median seconds for one of several calls in a row, taken in turns."""
        number = dict.fromkeys(ways, 0)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(-_WARM_UPS, _TURNS):
            for name, way in ways.items():
                self.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    way(number[name])
                    number[name] += 1
                self.synchronize()
                if turn >= 0:
                    taken[name].append((time.perf_counter() - start) / calls)
        return {name: statistics.median(seconds) for name, seconds in taken.items()}

    def bandwidth(self) -> dict[str, float]:
        """Return bytes a second of a copy (read and written) and of a sum (read)."""
        elements = _GIB if not self.dry else 1 << 20
        source = torch.ones(elements, dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        size = source.numel() * source.element_size()
        taken = self.times(
            {"copy": lambda _: target.copy_(source), "read": lambda _: source.sum()}, 3
        )
        return {"copy": 2 * size / taken["copy"], "read": size / taken["read"]}


def time_case(device: Device, case: Case, dtype: str) -> list[Row]:
    """Time the norm, the usual step, the clipped step and the step with an optimizer."""
    grads = [
        torch.randn(case.elements, device=device.device).to(DTYPES[dtype])
        for _ in range(case.count)
    ]
    size = sum(grad.numel() * grad.element_size() for grad in grads)
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    made = []
    for what, (theirs, ours) in _ways(parameters, grads).items():
        taken = device.times({"torch": theirs, "ours": ours}, 2)
        made.append(
            {
                "kind": "gpu time",
                "case": case.name,
                "dtype": dtype,
                "what": what,
                "bytes": size,
                "torch_milliseconds": taken["torch"] * 1e3,
                "milliseconds": taken["ours"] * 1e3,
                "ratio": taken["ours"] / taken["torch"],
            }
        )
    return made


def _ways(
    parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]
) -> dict[str, tuple[Timed, Timed]]:
    """Pair what torch does with what this library does, kind of step by kind of step."""
    norm = float(shardclip.get_total_norm(grads))
    held = list(parameters)
    clipper = shardclip.GradClipper(held, 2 * norm)
    stepper = shardclip.GradClipper(held, 2 * norm)
    measurer = shardclip.GradClipper(held, None)
    theirs, ours = (torch.optim.AdamW(held, lr=1e-9, fused=True) for _ in range(2))
    torch_norm, torch_clip = torch.nn.utils.get_total_norm, torch.nn.utils.clip_grad_norm_

    def clip_to(max_norm: float) -> None:
        clipper.max_norm = max_norm
        clipper.clip_()

    def torch_step(_: int) -> None:
        torch_clip(held, 2 * norm)
        theirs.step()

    def halve(clip: Callable[[float], object]) -> Timed:
        """Clip to half of what the last call left; both sides start from what they find."""

        def call(number: int) -> None:
            if number % 8 == 0:
                torch._foreach_mul_(list(grads), 256.0)  # both pay for it alike
            clip(norm * 2.0 ** (7 - number % 8))

        return call

    return {
        "norm": (lambda _: torch_norm(grads), lambda _: measurer.clip_()),
        "function": (lambda _: torch_norm(grads), lambda _: shardclip.get_total_norm(grads)),
        "usual": (lambda _: torch_clip(held, 2 * norm), lambda _: clip_to(2 * norm)),
        "step": (torch_step, lambda _: stepper.step(ours)),
        "clipped": (halve(lambda limit: torch_clip(held, limit)), halve(clip_to)),
    }


def table(made: Sequence[Row]) -> str:
    """Set the checks and the times in a table of 80 columns."""
    lines = []
    for row in made:
        if row["kind"] == "gpu check":
            mark = {True: "ok", False: "FAIL", None: "not made"}[row["passed"]]
            text = f"{mark:<9}{row['name']}: {row['detail']}"
            lines += textwrap.wrap(text, 79, subsequent_indent=" " * 9)
    lines += [""] + [
        f"{row['what']}: {row['bytes_a_second'] / 1e9:.0f} GB/s"
        for row in made
        if row["kind"] == "gpu bandwidth"
    ]
    read = max((r["bytes_a_second"] for r in made if r["kind"] == "gpu bandwidth"), default=0.0)
    lines += [
        "",
        f"{'tensors':<16}{'dtype':<7}{'what':<9}{'torch ms':>10}{'ours ms':>10}{'ratio':>8}"
        f"{'ours GB/s':>11}{'/ best':>8}",
        "-" * 79,
    ]
    lines += [_line(row, read) for row in made if row["kind"] == "gpu time"]
    lines.append(f"* asked of an H200: a norm of at least {SPEED}, a usual step of at most {USUAL}")
    return "\n".join(lines)


def _line(row: Row, best: float) -> str:
    line = f"{row['case']:<16}{row['dtype']:<7}{row['what']:<9}{row['torch_milliseconds']:>10.3f}"
    missed = row["what"] == "usual" and row["ratio"] > USUAL
    line += f"{row['milliseconds']:>10.3f}{row['ratio']:>8.3f}{'*' if missed else ' '}"
    if row["what"] in ("norm", "function", "usual"):  # one read of the gradients
        speed = row["bytes"] / row["milliseconds"] * 1e3
        missed = row["what"] == "norm" and speed < SPEED * best and row["case"] == CASES[0].name
        line += f"{speed / 1e9:>10.0f}{speed / best:>8.2f}{'*' if missed else ''}"
    return line.rstrip()


def main(arguments: list[str] | None = None) -> int:
    """Check, time, write and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=200.0, help="start no case later [200]")
    parser.add_argument("--out", type=Path, help="file to add to [runs/gpu/<time>.jsonl]")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is found; --device cpu runs it dry")
    start, device = time.perf_counter(), Device(args.device)
    described = records.machine() | {"device": args.device, "seed": 0}
    path = args.out or records.default_path("gpu")
    made: list[Row] = []

    def keep(rows: Sequence[Row]) -> None:  # at once: what was measured survives a time limit
        made.extend(rows)
        records.write(path, [row | described for row in rows])

    def checked(outcome: Outcome) -> None:
        keep([{"kind": "gpu check"} | asdict(outcome)])
        print(f"{time.perf_counter() - start:>5.0f} s  {outcome.name}", file=sys.stderr, flush=True)

    outcomes = run(device.device, checked)
    torch.manual_seed(0)
    speeds = device.bandwidth()
    keep([{"kind": "gpu bandwidth", "what": k, "bytes_a_second": v} for k, v in speeds.items()])
    for case in _DRY if device.dry else CASES:
        for dtype in DTYPES:
            if time.perf_counter() - start < args.seconds:
                keep(time_case(device, case, dtype))
                took = time.perf_counter() - start
                print(f"{took:>5.0f} s  {case.name} {dtype}", file=sys.stderr, flush=True)
    print(table(made))
    print(f"\n{len(made)} rows in {path}, {time.perf_counter() - start:.0f} s")
    return int(any(outcome.passed is False for outcome in outcomes))
