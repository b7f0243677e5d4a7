"""One script for one GPU and four minutes: check every path of a device, then time it.

`python -m benchmarks.gpu` needs torch with CUDA and nothing else; `--device cpu` runs it dry, on
small sizes, as far as the paths are there. Rows are added to a file, and a table is printed. The
exit code is 1 where a check failed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import records
from benchmarks.records import Row

from . import table
from .steps import Outcome, run
from .timing import CASES, DRY, DTYPES, Device, time_case


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
    for case in DRY if device.dry else CASES:
        for dtype in DTYPES:
            if time.perf_counter() - start < args.seconds:
                keep(time_case(device, case, dtype))
                took = time.perf_counter() - start
                print(f"{took:>5.0f} s  {case.name} {dtype}", file=sys.stderr, flush=True)
    print(table(made))
    print(f"\n{len(made)} rows in {path}, {time.perf_counter() - start:.0f} s")
    return int(any(outcome.passed is False for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
