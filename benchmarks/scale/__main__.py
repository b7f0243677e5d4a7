"""Show what happens past this machine: plans of up to 16,384 ranks, and a model of latency.

Plans are measured, in one process. The latency of the all-reduces is modelled, and says so.
"""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks import records
from benchmarks.cases import LLAMA_70B, LLAMA_405B, Llama
from benchmarks.records import Row

from .latency import microseconds, ways
from .planning import Planned, measure
from .replay import Layout
from .tables import latency_table, planning_table

CASES: tuple[tuple[Llama, Layout], ...] = (
    (LLAMA_70B, Layout(1, 1, 1, 8)),
    (LLAMA_70B, Layout(1, 2, 4, 8)),
    (LLAMA_70B, Layout(4, 2, 8, 8)),
    (LLAMA_70B, Layout(4, 16, 8, 8)),
    (LLAMA_70B, Layout(8, 32, 8, 8)),
    (LLAMA_405B, Layout(8, 1, 8, 8)),
    (LLAMA_405B, Layout(16, 4, 8, 8)),
    (LLAMA_405B, Layout(16, 16, 8, 8)),
)


def main() -> None:
    """Measure, model, write the rows and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--ranks", type=int, default=16_384, help="at most so many [16384]")
    parser.add_argument("--out", type=Path, help="file to add to [runs/scale/<time>.jsonl]")
    args = parser.parse_args()
    chosen = [(model, layout) for model, layout in CASES if layout.ranks <= args.ranks]
    if not chosen:
        parser.error(f"--ranks: the smallest layout has {min(c[1].ranks for c in CASES)} ranks")
    described, start = records.machine(), time.perf_counter()
    made = []
    bar = tqdm(chosen, disable=not sys.stderr.isatty(), ncols=79, leave=False)
    for model, layout in bar:
        bar.set_description_str(f"{model.name} on {layout.ranks}")
        made += [row | described for row in _rows(model, layout, measure(model, layout))]
        if bar.disable:
            took = time.perf_counter() - start
            print(f"{model.name:>5} on {layout.ranks:>6} ranks {took:>8.0f} s", flush=True)
    path = args.out or records.default_path("scale")
    records.write(path, made)
    print(f"\n{planning_table(made)}\n\n{latency_table(made)}\n")
    print(f"{len(made)} rows in {path}\n{time.perf_counter() - start:.0f} s")


def _rows(model: Llama, layout: Layout, planned: Planned) -> list[Row]:
    case = {"model": model.name, "mesh": str(layout), "ranks": layout.ranks}
    modelled = [
        {
            "kind": "modelled latency",
            **case,
            "contender": way.name,
            "all_reduces": sum(
                any(getattr(layout, axis) > 1 for axis in axes) for axes in way.axes
            ),
            "bytes": way.lanes * way.number,
            "modelled_microseconds": microseconds(way, layout),
        }
        for way in ways(planned.lanes)
    ]
    return [{"kind": "planning", **case, **asdict(planned)}, *modelled]


if __name__ == "__main__":
    main()
