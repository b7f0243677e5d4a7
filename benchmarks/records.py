"""What is kept of a run: one JSON line for each measurement, and a table to read."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import shardclip

from .cases import Case
from .contenders import BASELINE, CONTENDERS
from .measuring import Plan
from .ranks import STEPS, Measurement

Row = dict[str, Any]


def context(plan: Plan) -> Row:
    """Describe the run: versions, machine and how busy it is, seed, and how much is measured."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "shardclip": shardclip.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rounds": plan.rounds,
        **asdict(plan.settings),
    }


def _processor() -> str:
    """Return the processor's name; Linux tells it only in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def rows(measurements: Sequence[Measurement], cases: Sequence[Case], described: Row) -> list[Row]:
    """Turn measurements into rows that stand alone: times, ratio, counts, case, machine."""
    shapes = {case.name: case for case in cases}
    medians = {
        (one.case, one.step, one.contender): statistics.median(one.seconds) for one in measurements
    }
    made = []
    for one in measurements:
        case, mine = shapes[one.case], medians[one.case, one.step, one.contender]
        row = asdict(one) | {
            "median": mine,
            "ratio": mine / medians[one.case, one.step, BASELINE.name],
            "ranks": case.ranks,
            "mesh": list(case.mesh),
            "parameters": case.count,
            "shape": list(case.shape),
        }
        made.append(row | described)
    return made


def write(path: Path, made: Sequence[Row]) -> None:
    """Add one JSON object a line to `path`; what the file holds already stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in made)


def table(made: Sequence[Row]) -> str:
    """Set the rows in a table of 80 columns: torch's time, the others as ratios, the counts."""
    by_key = {(row["case"], row["step"], row["contender"]): row for row in made}
    cases = list(dict.fromkeys(row["case"] for row in made))
    lines = [
        f"{'':<20}{'torch':>8}   {'ratio to torch':^23}   {'all-reduces in a call':>23}",
        f"{'case':<13}{'step':<7}{'ms':>8}   {'clip_grad_norm_':>15}{'clipper':>8}"
        f"   {'torch':>6}{'function':>9}{'clipper':>8}",
    ]
    lines.append("-" * len(lines[-1]))
    for case in cases:
        for step in STEPS:
            base, function, clipper = (by_key[case, step, one.name] for one in CONTENDERS)
            lines.append(
                f"{case if step == STEPS[0] else '':<13}{step:<7}{base['median'] * 1e3:>8.1f}"
                f"   {function['ratio']:>15.3f}{clipper['ratio']:>8.3f}"
                f"   {base['all_reduces']:>6}{function['all_reduces']:>9}"
                f"{clipper['all_reduces']:>8}"
            )
    return "\n".join(lines)


def default_path() -> Path:
    """Return a new file's name, from the time."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / "benchmarks" / f"{stamp}.jsonl"
