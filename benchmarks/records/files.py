"""Rows in files: one JSON line each, added at the end."""

import json
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Row = dict[str, Any]

HERE = Path(__file__).parents[1]
KEPT = HERE / "records"
"""Records that RESULTS.md is made from."""


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
