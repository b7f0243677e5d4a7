"""Measures every contender on the same gradients, in fresh processes for every round."""

import json
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.multiprocessing.spawn import start_processes

from .cases import Case
from .ranks import Measurement, Settings, run_rank


@dataclass(frozen=True)
class Plan:
    """How much to measure.

    Attributes:
        rounds: Fresh sets of processes; each gives one first call.
        settings: What every rank is told.
    """

    rounds: int = 3
    settings: Settings = field(default_factory=Settings)


def measure(
    cases: Sequence[Case], plan: Plan, report: Callable[[str], None] = print
) -> list[Measurement]:
    """Measure cases that all have the same number of ranks.

    Args:
        cases: What to measure.
        plan: How much.
        report: Called with a line of progress after each round.

    Returns:
        A measurement for each case, kind of step and contender, all rounds in one.

    Raises:
        ValueError: The cases have different numbers of ranks.
    """
    ranks = sorted({case.ranks for case in cases})
    if len(ranks) != 1:
        raise ValueError(f"cases: one number of ranks expected, got {ranks}")
    found: dict[tuple[str, str, str], list[Measurement]] = defaultdict(list)
    names = ", ".join(case.name for case in cases)
    for index in range(plan.rounds):
        start = time.perf_counter()
        for one in _round(cases, replace(plan.settings, turn=index), ranks[0]):
            found[one.case, one.step, one.contender].append(one)
        took = time.perf_counter() - start
        report(f"round {index + 1} of {plan.rounds}, {names}: {took:.0f} s")
    return [_merge(rounds) for rounds in found.values()]


def _round(cases: Sequence[Case], settings: Settings, ranks: int) -> list[Measurement]:
    """Start the ranks, wait for them, and read what rank 0 wrote."""
    # The fork server imports torch once; spawned processes would each take seconds to do so.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_rank.__module__])
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, tuple(cases), settings, folder)
        start_processes(run_rank, given, nprocs=ranks, start_method="forkserver")  # type: ignore[no-untyped-call]
        rows = json.loads((Path(folder) / "measured.json").read_text(encoding="utf-8"))
    return [Measurement(**row) for row in rows]


def _merge(rounds: Sequence[Measurement]) -> Measurement:
    """Put the rounds' times together; the counts are the largest seen."""
    return replace(
        rounds[0],
        seconds=[second for one in rounds for second in one.seconds],
        all_reduces=max(one.all_reduces for one in rounds),
        collectives=max(one.collectives for one in rounds),
        reading=max(one.reading for one in rounds),
        building=max(one.building for one in rounds),
        norm_error=max(one.norm_error for one in rounds),
    )
