"""JSON lines of a run: how a step is written and read. Knows nothing of torch.

Version 1: one JSON object a line, UTF-8. A header starts the file, and again every continued run::

    {"format": "shardclip-steps", "version": 1, "shardclip": "0.1.0", "run": "demo",
     "norm_type": 2.0, "time": 1767225600.0, "meta": {...}}

``meta`` is the caller's. Every other line is a step::

    {"step": 1, "time": ..., "total_norm": 3.5, "clipped_norm": 1.0, "clip_coef": 0.29,
     "max_norm": 1.0, "clipped": true, "skipped": false, "finite": true,
     "groups": [{"norm": ..., "coef": ..., "max_norm": ...}, ...],
     "norms": {"layers.0": 0.7, ...}, "sums": {"loss": 2.1}}

- A number that is not finite is one of the strings "NaN", "Infinity", "-Infinity", since JSON has
  none (Python's ``float`` reads them). ``null`` stands for "no threshold".
- ``groups`` is there with several param groups alone, ``norms`` and ``sums`` where there are any.
  ``max_norm`` is then null unless the groups share it.
- Where a step's number comes again, the run was continued from before it: the later line counts.
- A line without its end was cut by a crash, and is passed over. Readers ignore keys that they do
  not know; a change that older readers would misread raises ``version``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardclip._version import __version__

from .outcome import Outcome

FORMAT, VERSION = "shardclip-steps", 1
_NO_OBJECT = "no JSON object; give a file of JSON lines, as JsonLines writes it"
# A line is cut by a crash at the end, or before the header of the run that goes on.
_END: tuple[int, dict[str, Any]] = (0, {"format": FORMAT})


class RunFileError(ValueError):
    """A file is not what it should be; the message says which, where and what to do."""


@dataclass
class Run:
    """What a file holds.

    Attributes:
        name: The run's name, from the header or the file's name.
        steps: In the order of their numbers.
        meta: The caller's, from the last header.
        notes: What the reader had to pass over, for people.
    """

    name: str
    steps: list[Outcome] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def header_line(run: str, norm_type: float, meta: Mapping[str, Any]) -> str:
    """Return a header, without the line's end.

    Raises:
        TypeError: ``meta`` holds what JSON has no word for.
    """
    about = {"format": FORMAT, "version": VERSION, "shardclip": __version__, "run": run}
    now = {"norm_type": _number(norm_type), "time": time.time(), "meta": dict(meta)}
    return json.dumps(_plain(about | now), allow_nan=False)


def step_line(step: Outcome, *, norms: bool = True) -> str:
    """Return a step, without the line's end.

    Args:
        step: What it found and did.
        norms: Whether the norms by name are written.
    """
    out: dict[str, Any] = {
        "step": step.step,
        "time": step.time,
        "total_norm": _number(step.total_norm),
        "clipped_norm": _number(step.clipped_norm),
        "clip_coef": _number(step.clip_coef),
        "max_norm": _threshold(step.max_norm),
        "clipped": step.clipped,
        "skipped": step.skipped,
        "finite": step.finite,
    }
    if len(step.group_norms) > 1:
        groups = zip(step.group_norms, step.group_coefs, step.max_norms, strict=True)
        out["groups"] = [
            {"norm": _number(norm), "coef": _number(coef), "max_norm": _threshold(limit)}
            for norm, coef, limit in groups
        ]
    if norms and step.norms:
        out["norms"] = {name: _number(value) for name, value in step.norms.items()}
    if step.sums:
        out["sums"] = {name: _number(value) for name, value in step.sums.items()}
    return json.dumps(out, allow_nan=False)


def read(path: str | Path) -> Run:
    """Read a run.

    Args:
        path: A file of JSON lines. One without header is read too if its lines have a
            ``total_norm``.

    Raises:
        RunFileError: It is missing, empty, of a newer version, or holds no steps; or a line in its
            midst is not JSON.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return _read(path, file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFileError(f"{path}: {reason.lower()}; give a file that JsonLines wrote") from None


def _read(path: Path, lines: Iterable[str]) -> Run:
    run, norm_type, headers, number = Run(path.stem), 2.0, 0, 0
    entries = [(n, _entry(line)) for n, line in enumerate(lines, start=1) if line.strip()]
    for (number, entry), (_, following) in pairwise([*entries, _END]):
        if entry is None:
            if following is None or "format" not in following:
                raise RunFileError(f"{path}, line {number}: {_NO_OBJECT}")
            run.notes.append(f"line {number} was cut short and is left out")
        elif "format" in entry:
            headers += 1
            norm_type = _opened(path, number, entry, run)
        else:
            _append(run, _step(path, number, entry, norm_type, len(run.steps)))
    if not run.steps:
        if headers:
            raise RunFileError(f"{path} has a header but no step; the run has not clipped yet")
        if number:
            raise RunFileError(f"{path}, line {number}: {_NO_OBJECT}")
        raise RunFileError(f"{path} is empty; the run has not written a step yet")
    if not headers:
        run.notes.append("no header: read as p = 2")
    return run


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _opened(path: Path, number: int, entry: dict[str, Any], run: Run) -> float:
    """Take a header; return the norm type."""
    if entry["format"] != FORMAT:
        raise RunFileError(
            f"{path}, line {number}: the format is {entry['format']!r}, not {FORMAT!r}"
        )
    version = entry.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise RunFileError(
            f"{path}, line {number}: version {version} of the format, and this shardclip reads up "
            f"to {VERSION}; upgrade shardclip"
        )
    run.name = str(entry.get("run") or run.name)
    run.meta = dict(entry.get("meta") or {})
    return float(entry.get("norm_type", 2.0))


def _append(run: Run, step: Outcome) -> None:
    """Add a step; where the run was continued from before it, its later account counts."""
    if run.steps and step.step <= run.steps[-1].step:
        last = run.steps[-1].step
        while run.steps and run.steps[-1].step >= step.step:
            run.steps.pop()
        run.notes.append(
            f"continued at step {step.step} after step {last}; "
            "steps done twice are shown as done the second time"
        )
    run.steps.append(step)


def _step(path: Path, number: int, entry: dict[str, Any], norm_type: float, before: int) -> Outcome:
    try:
        total = float(entry["total_norm"])
        limit = _limit(entry.get("max_norm"))
        coef = entry.get("clip_coef")
        coef = min(1.0, limit / (total + 1e-6)) if coef is None else float(coef)
        alone = [{"norm": total, "coef": coef, "max_norm": limit}]
        groups = entry.get("groups") or alone
        return Outcome(
            total,
            tuple(float(group["norm"]) for group in groups),
            tuple(float(group["coef"]) for group in groups),
            tuple(_limit(group["max_norm"]) for group in groups),
            {name: float(value) for name, value in (entry.get("norms") or {}).items()},
            {name: float(value) for name, value in (entry.get("sums") or {}).items()},
            norm_type,
            bool(entry.get("skipped", False)),
            int(entry.get("step", before + 1)),
            float(entry.get("time", 0.0)),
        )
    except KeyError as error:
        raise RunFileError(
            f"{path}, line {number}: no {error.args[0]!r}; give a file of steps, as JsonLines "
            "writes it"
        ) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise RunFileError(f"{path}, line {number}: {error}") from None


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _plain(value: Any) -> Any:
    """Do the same inside the caller's own structures."""
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _threshold(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _limit(value: Any) -> float:
    return math.inf if value is None else float(value)
