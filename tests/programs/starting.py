"""Starting a program of this repository as a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import aborts

ROOT = Path(__file__).parents[2]
LIMIT_S = 800
"""Of a program, some times what it takes on two cores."""


def run(*command: str, code: int = 0) -> str:
    """Run a Python program from the repository's root and return what it printed."""
    done = run_through(*command)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def run_through(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a Python program from the repository's root to its end, whatever that is."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return aborts.run_through(
        lambda: subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    )


def widest(printed: str, out: Path) -> int:
    """Count the columns of the longest line, with a short path where it names this one."""
    return max(map(len, printed.replace(str(out), "runs/out").splitlines()))


def records(path: Path) -> list[dict]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
