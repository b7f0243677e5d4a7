"""Make RESULTS.md and its pictures from the records: `python -m benchmarks.report`.

Of each measurement the latest record counts. Everything in the report comes from the records, so
the same records always give the same report.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu, records
from benchmarks.records import Row
from benchmarks.scale import latency_table, planning_table

from . import pictures, tables, targets

RESULTS = records.HERE / "RESULTS.md"
PICTURES = records.HERE / "pictures"

_KEYS = {
    "clip": ("case", "step", "contender"),
    "absent": ("case", "contender"),
    "planning": ("model", "mesh"),
    "modelled latency": ("model", "mesh", "contender"),
    "gpu check": ("name",),
    "gpu bandwidth": ("what",),
    "gpu time": ("case", "dtype", "what"),
}
"""What makes a record of a kind the successor of another."""


def main() -> None:
    """Read the records, draw and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("records", type=Path, nargs="*", help="files [benchmarks/records/*.jsonl]")
    parser.add_argument("--out", type=Path, default=RESULTS, help="[benchmarks/RESULTS.md]")
    args = parser.parse_args()
    paths = args.records or sorted(records.KEPT.glob("*.jsonl"))
    if not paths:
        parser.error(f"no records: run `python -m benchmarks --out {records.KEPT}/cpu.jsonl`")
    made = latest(records.load(paths))
    folder = args.out.parent / PICTURES.name
    drawn = pictures.draw(made, folder)
    shown = {question: os.path.relpath(path, args.out.parent) for question, path in drawn.items()}
    args.out.write_text(report(made, shown), encoding="utf-8")
    print(f"{args.out}: {len(made)} records, {len(drawn)} pictures")


def latest(made: Sequence[Row]) -> list[Row]:
    """Keep the last record of each measurement; who was left out later has no older times."""
    kept = []
    for kind, keys in _KEYS.items():
        kept += records.latest((row for row in made if row["kind"] == kind), *keys)
    newest: dict[Any, str] = {}
    for row in kept:
        if row["kind"] in ("clip", "absent"):
            newest[row["case"]] = max(row["time"], newest.get(row["case"], ""))
    return [row for row in kept if "case" not in row or row["time"] >= newest.get(row["case"], "")]


def report(made: Sequence[Row], shown: dict[str, str]) -> str:
    """Write the report: what was to be reached, pictures, tables; each with its machine."""
    clips = _of(made, "clip", "absent")
    measured = [row for row in clips if row["kind"] == "clip"]
    parts = ["# Results", _HEAD]
    if measured:
        parts += ["## What is to be reached", _machine(measured), _code(targets.table(clips))]
        parts += [f"## {question}\n\n![{question}]({path})" for question, path in shown.items()]
        parts += ["## Every case", _LEGEND, _code(tables.of_cases(clips))]
    planned = _of(made, "planning", "modelled latency")
    if planned:
        parts += ["## Past this machine", _machine(planned), _code(planning_table(planned))]
        parts += [_MODELLED, _code(latency_table(planned))]
    parts += ["## On a GPU", *_gpu(_of(made, "gpu check", "gpu bandwidth", "gpu time"))]
    return "\n\n".join(parts) + "\n"


_HEAD = """Made from `benchmarks/records/` by `python -m benchmarks.report`; change nothing here by
hand. `python -m benchmarks`, `python -m benchmarks.scale` and `python -m benchmarks.gpu` make
records. Times are medians over turns in which all take part one after the other, a call's time is
that of its slowest rank, and a ratio is taken within a turn: to torch's function where it can do
the case, else to the first that can."""

_LEGEND = """Bytes are counted operator by operator, in units of the bytes of this rank's gradients;
scratch memory that stays in cache counts like any other. Host syncs are the values that the host
reads where reading is not free, as on a device (on CPU it is). The error is the norm's, relative to
float64."""

_MODELLED = """The next table is **modelled, not measured**: an alpha-beta model with NCCL's own
constants, stated with their source in `benchmarks/scale/latency.py`. torch's norm is that of each
pipeline stage alone, so it has one all-reduce less than it would need. One all-reduce over all GPUs
is deeper than several over an axis each: at thousands of GPUs it takes longer, and `group=` of one
replica's ranks takes that back, where each replica may read all of its gradients."""


def _of(made: Sequence[Row], *kinds: str) -> list[Row]:
    return [row for row in made if row["kind"] in kinds]


def _code(text: str) -> str:
    return f"```text\n{text}\n```"


def _machine(made: Sequence[Row]) -> str:
    """Name what the records were made on; several commits or machines are all named."""

    def values(of: Callable[[Row], object]) -> str:
        return ", ".join(dict.fromkeys(str(of(row)) for row in made))

    packages = {f"{k} {v}": None for row in made for k, v in row["packages"].items()}
    where = f"{values(lambda row: row['processor'])}, {values(lambda row: row['cores'])} cores"
    text = f"{where}; torch {values(lambda row: row['torch'])}"
    if packages:
        text += f", {', '.join(packages)}"
    days = values(lambda row: row["time"][:10])
    return f"{text}; commit {values(lambda row: row['commit'])}; {days}."


def _gpu(made: Sequence[Row]) -> list[str]:
    real = [row for row in made if row["device"] == "cuda"]
    if not real:
        return ["No record from a GPU yet: `python -m benchmarks.gpu` makes them in four minutes."]
    devices = ", ".join(dict.fromkeys(str(row["gpu"]) for row in real))
    return [f"{devices}; {_machine(real)}", _code(gpu.table(real))]
