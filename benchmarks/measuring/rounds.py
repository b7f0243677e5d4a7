"""Measures every contender on the same gradients, in fresh processes for every round."""

import importlib.util
import json
import multiprocessing
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import start_processes

from benchmarks.cases import Case
from benchmarks.contenders import MANY_MESHES
from benchmarks.counting import Counts

from .measurement import Measurement
from .ranks import Settings, run_rank

_SLOW_IMPORTS = ("accelerate", "torchtitan.distributed.utils")
_LOOK_S = 0.2  # how often to look for a case that is done


@dataclass(frozen=True)
class Plan:
    """How much to measure.

    Attributes:
        rounds: Fresh sets of processes; each gives one first call.
        settings: What every rank is told.
    """

    rounds: int = 3
    settings: Settings = field(default_factory=Settings)


@dataclass
class Found:
    """What a run measured, and who was left out of which case, with the reason."""

    measurements: list[Measurement] = field(default_factory=list)
    absent: dict[str, dict[str, str]] = field(default_factory=dict)


def together(cases: Sequence[Case]) -> list[list[Case]]:
    """Put cases together that run in the same processes.

    DeepSpeed has its own, and so has a process without a group.
    """
    groups: dict[object, list[Case]] = {}
    for case in cases:
        apart = case.layout if case.layout in ("plain", "zero2") else ""
        groups.setdefault((case.ranks, apart), []).append(case)
    return list(groups.values())


def prepare(cases: Sequence[Case]) -> None:
    """Let the fork server import once what the ranks need; each would take seconds to do so."""
    needed = any(case.layout in MANY_MESHES for case in cases)
    installed = [n for n in _SLOW_IMPORTS if needed and importlib.util.find_spec(n.split(".")[0])]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_rank.__module__, *installed])


def rounds_of(group: Sequence[Case], plan: Plan) -> int:
    """Say how often a group is measured; an engine is slow to start, and has no first call."""
    return 1 if group[0].layout == "zero2" else plan.rounds


def measure(group: Sequence[Case], plan: Plan, done: Callable[[str], None]) -> Found:
    """Measure cases in the same processes, new ones for every round, and put the rounds together.

    Args:
        group: What to measure: cases of one group of ``together``.
        plan: How much.
        done: Called with a case's name each time it has been measured.
    """
    rounds: dict[tuple[str, str, str], list[Measurement]] = defaultdict(list)
    found = Found()
    for turn in range(rounds_of(group, plan)):
        for line in _round(group, replace(plan.settings, turn=turn), done):
            found.absent[line["case"]] = line["absent"]
            for row in line["measured"]:
                one = Measurement(**row | {"counts": Counts(**row["counts"])})
                rounds[one.case, one.step, one.contender].append(one)
    found.measurements = [_merge(measured) for measured in rounds.values()]
    return found


def _round(
    cases: Sequence[Case], settings: Settings, done: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Start the ranks, wait for them, and read what rank 0 wrote."""
    ranks, told = cases[0].ranks, 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.jsonl"
        given = (ranks, tuple(cases), settings, folder)
        running: Any = start_processes(  # type: ignore[no-untyped-call]
            run_rank, given, nprocs=ranks, join=False, start_method="forkserver"
        )
        lines: list[dict[str, Any]] = []
        finished = False
        while not finished:
            finished = running.join(timeout=_LOOK_S)
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            lines = [
                json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"
            ]
            for line in lines[told:]:
                done(line["case"])
            told = len(lines)
    return lines


def _merge(rounds: Sequence[Measurement]) -> Measurement:
    """Put the rounds' times together; the counts are those of the first."""
    return replace(
        rounds[0],
        seconds=[second for one in rounds for second in one.seconds],
        cpu_seconds=[second for one in rounds for second in one.cpu_seconds],
        hidden=[second for one in rounds for second in one.hidden],
    )
