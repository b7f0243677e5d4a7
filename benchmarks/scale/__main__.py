"""Show what happens past this machine: plans of up to 16,384 ranks, and a model of latency.

Plans are measured, in one process. The latency of the all-reduces is modelled, and says so.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks import records
from benchmarks.cases import LLAMA_70B, LLAMA_405B, Llama
from benchmarks.records import Row

from .latency import microseconds, ways
from .planning import Planned, measure
from .replay import Layout

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


Cell = Callable[[Row], str]


def planning_table(made: Sequence[Row]) -> str:
    """Set the measured plans in a table."""
    lines = [
        "MEASURED in one process: a GradClipper built, and its first plan, on one rank",
        f"{'':<6}{'pp x replicate':>17}{'':>7}{'parameters':>11}{'CPU ms':>8}{'memory MiB':>13}"
        f"{'payload':>9}{'busiest':>9}",
        f"{'model':<6}{'x shard x tp':>17}{'ranks':>7}{'of a rank':>11}{'in all':>8}"
        f"{'peak':>7}{'kept':>6}{'KiB':>9}{'/ fair':>9}",
        "-" * 80,
    ]
    for row in made:
        if row["kind"] != "planning":
            continue
        spent = (row["build"] + row["first"]) * 1e3
        lines.append(
            f"{row['model']:<6}{row['mesh']:>17}{row['ranks']:>7}{row['parameters']:>11}"
            f"{spent:>8.1f}{row['memory'] / 2**20:>7.1f}{row['kept'] / 2**20:>6.1f}"
            f"{row['lanes'] / 128:>9.1f}{row['most'] / row['fair']:>9.4f}"
        )
    return "\n".join(lines)


def latency_table(made: Sequence[Row]) -> str:
    """Set the modelled latencies in a table."""
    lines = [
        "MODELLED, not measured: microseconds of a step's all-reduces (their number)",
        f"{'':<30}{'torch,':>11}{'':>24}{'GradClipper':>13}",
        f"{'model':<6}{'mesh':>17}{'ranks':>7}{'per stage':>11}{'torchtitan':>12}"
        f"{'GradClipper':>12}{'of a replica':>13}",
        "-" * 78,
    ]
    by_mesh: dict[Any, list[Row]] = {}
    for row in made:
        if row["kind"] == "modelled latency":
            by_mesh.setdefault((row["model"], row["mesh"], row["ranks"]), []).append(row)
    for (model, mesh, ranks), held in by_mesh.items():
        cells = [f"{row['modelled_microseconds']:.0f} ({row['all_reduces']})" for row in held]
        line = f"{model:<6}{mesh:>17}{ranks:>7}"
        for cell, width in zip(cells, (11, 12, 12, 13), strict=True):
            line += f"{cell:>{width}}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
