"""Tells the batch script why its ranks stopped: a job that somebody cancelled is to stay so.

What Slurm shows of the job while its batch script still runs (seen in 22.05):

| the ranks stopped since            | JobState   | Reason    | Restarts | PreemptTime           |
|------------------------------------|------------|-----------|----------|-----------------------|
| it is preempted, with a grace time | RUNNING    | None      |          | set                   |
| that grace time is over            | COMPLETING | TimeLimit |          | set                   |
| it is preempted, without one       | COMPLETING | None      |          | set, and EndTime's    |
| its time limit is near             | RUNNING    | None      |          | None                  |
| its time limit is over             | COMPLETING | TimeLimit |          | None                  |
| Slurm requeued it: preempted, or   |            |           |          |                       |
| a node failed                      | COMPLETING | None      | one more | None                  |
| `scancel JOB`                      | COMPLETING | None      |          | None, or before       |
|                                    |            |           |          | EndTime               |
| `scancel JOB.STEP`                 | RUNNING    | None      |          | None                  |
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import variables as names
from .variables import number

_LINE = re.compile(r"^ +(?=(?:JobState|Requeue|StartTime|Preempt\w+)=)(.*)$", re.MULTILINE)
"""The lines that are read; a job's name or comment, which may say anything, begins none."""
_TRIES = 3


@dataclass(frozen=True)
class Ending:
    """Why the ranks stopped."""

    requeue: bool
    """Whether the job is to be started again."""
    why: str
    """For the job's log."""


def judge(job: Mapping[str, str], restart: int, notices: Collection[str]) -> Ending:
    """Tell why a job's ranks stopped, by what Slurm shows of it; in doubt it is not requeued.

    Args:
        job: what `scontrol show job` says, by its names; empty: it did not answer.
        restart: how often the job had been started again when the ranks started.
        notices: the signals that reached launchers, guards or the batch script.
    """
    if not job.get("JobState"):
        return Ending(False, "Slurm does not tell whether the job was cancelled")
    if int(job.get("Restarts", restart)) > restart:
        return Ending(False, "Slurm itself starts the job again")
    preempted = job.get("PreemptTime", "None") != "None"
    if job["JobState"] == "RUNNING":
        return Ending(True, "preempted") if preempted else _told(job, notices)
    if job.get("Reason") == "TimeLimit":
        return Ending(True, "preempted" if preempted else "time limit reached")
    if preempted and job["PreemptTime"] == job.get("EndTime"):
        return Ending(True, "preempted")
    return Ending(False, f"the job was cancelled ({job['JobState']})")


def _told(job: Mapping[str, str], notices: Collection[str]) -> Ending:
    """Tell why the ranks of a job stopped that nothing has happened to."""
    for name in ("TERM", "INT"):
        if name in notices:
            return Ending(False, f"the job's step was cancelled, or sent {name} by hand")
    if notices:
        end = job.get("EndTime", "unknown")
        return Ending(True, f"told by {', '.join(sorted(notices))}, time limit {end}")
    return Ending(True, "asked for by the script or the stop file")


def parse(shown: str) -> dict[str, str]:
    """Read what `scontrol show job` prints of one job."""
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(_LINE.findall(shown))))


def _show(job: str) -> dict[str, str]:
    for waited in range(_TRIES):
        # a busy controller may not answer once
        time.sleep(waited)
        done = subprocess.run(
            ["scontrol", "show", "job", job], capture_output=True, text=True, check=False
        )
        if found := parse(done.stdout):
            return found
    print(done.stderr, end="", file=sys.stderr)
    return {}


def _notices() -> set[str]:
    try:
        return set(Path(os.environ[names.STOP_FILE]).read_text().split())
    except OSError:
        return set()


def main() -> int:
    """Print why the ranks of the job stopped; returns 0 where it is to be requeued, else 1."""
    restart = number(os.environ, names.SLURM["restart"]) or 0
    ending = judge(_show(sys.argv[1]), restart, _notices())
    print(ending.why)
    return 0 if ending.requeue else 1


if __name__ == "__main__":
    raise SystemExit(main())
