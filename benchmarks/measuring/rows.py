"""What is kept of a run: one JSON line for each measurement, with all needed to judge it."""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import shardclip
from benchmarks.cases import Case
from benchmarks.contenders import BASELINES

from .measurement import Measurement
from .rounds import Found, Plan

Row = dict[str, Any]

HERE = Path(__file__).parents[1]
KEPT = HERE / "records"
"""Records that RESULTS.md is made from."""

_PACKAGES = ("accelerate", "torchtitan", "deepspeed", "triton")
_BASE_NAMES = {contender.name for contender in BASELINES}


def machine() -> Row:
    """Describe what a record was made with: time, commit, versions, machine and how busy it is."""
    versions = {name: _version(name) for name in _PACKAGES}
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "shardclip": shardclip.__version__,
        "torch": torch.__version__,
        "packages": {name: version for name, version in versions.items() if version},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "gpu": cuda,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the checkout's commit, with a plus where tracked files differ from it."""
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(HERE), *command], capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changes else "")


def _processor() -> str:
    """Return the processor's name; Linux tells it only in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def rows(found: Found, cases: Sequence[Case], plan: Plan, described: Row) -> list[Row]:
    """Turn measurements into rows that stand alone: times, ratios, counts, case, machine.

    A ratio is the median, over the turns, of a call's time to the baseline's in the same turn: what
    slows the machine for a while slows both.
    """
    context = described | {"rounds": plan.rounds, **asdict(plan.settings)}
    by_name = {case.name: case for case in cases}
    made = []
    for one in found.measurements:
        base = _baseline(one, found.measurements)
        row = {"kind": "clip"} | asdict(one) | _statistics(one, base)
        made.append(row | _described(by_name[one.case]) | context)
    for name, reasons in found.absent.items():
        made += [
            {"kind": "absent", "case": name, "contender": contender, "reason": reason} | context
            for contender, reason in reasons.items()
        ]
    return made


def _baseline(one: Measurement, measurements: Iterable[Measurement]) -> Measurement | None:
    """Find what a user would call instead: the first baseline that does the same."""
    same = (m for m in measurements if (m.case, m.step, m.does) == (one.case, one.step, one.does))
    present = {m.contender: m for m in same}
    return next((present[c.name] for c in BASELINES if c.name in present), None)


def _statistics(one: Measurement, base: Measurement | None) -> Row:
    return {
        "milliseconds": quartiles([second * 1e3 for second in one.seconds]),
        "cpu_milliseconds": quartiles([second * 1e3 for second in one.cpu_seconds]),
        "hidden_milliseconds": quartiles([second * 1e3 for second in one.hidden]),
        "baseline": base.contender if base else None,
        "ratio": _ratios(one.seconds, base.seconds) if base else None,
        "cpu_ratio": _ratios(one.cpu_seconds, base.cpu_seconds) if base else None,
    }


def _ratios(mine: Sequence[float], base: Sequence[float]) -> list[float]:
    return quartiles([m / b for m, b in zip(mine, base, strict=True)])


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    if not values:
        return [0.0, 0.0, 0.0]
    if len(values) == 1:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def _described(case: Case) -> Row:
    return {
        "layout": case.layout,
        "shapes": case.shapes.name,
        "text": case.text,
        "dtype": case.dtype,
        "ranks": case.ranks,
        "parameters": case.shapes.count,
        "elements": case.shapes.elements,
    }


def ours(row: Row) -> bool:
    """Whether a row is of this library."""
    return row["contender"] not in _BASE_NAMES


def write(path: Path, made: Iterable[Row]) -> None:
    """Add one JSON object a line to `path`; what the file holds already stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in made)


def load(paths: Iterable[Path]) -> list[Row]:
    """Read records, oldest first."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda row: str(row["time"]))


def latest(made: Iterable[Row], *keys: str) -> list[Row]:
    """Keep the last row of each value of the keys, in the order of first appearance."""
    kept: dict[tuple[Any, ...], Row] = {}
    for row in made:
        kept[tuple(row.get(key) for key in keys)] = row
    return list(kept.values())


def default_path(kind: str = "benchmarks") -> Path:
    """Return a new file's name, from the time."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / kind / f"{stamp}.jsonl"
