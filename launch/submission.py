"""Hands a batch script to Slurm and follows its job; the only file that calls Slurm's commands."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from .errors import LaunchError

_LIVE = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STAGE_OUT",
         "RESIZING", "SIGNALING", "SPECIAL_EXIT", "REQUEUE_HOLD", "REQUEUE_FED"}  # fmt: skip


def _slurm(command: list[str], text: str | None = None) -> str:
    if shutil.which(command[0]) is None:
        raise LaunchError(
            f"{command[0]} is not on this host: submit from a login node of the cluster, or "
            "print the script with --dry-run"
        )
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"{' '.join(command)}: {done.stderr.strip() or 'failed'}")
    return done.stdout


def submit(script: str) -> str:
    """Submit a batch script; returns the job's id."""
    answer = _slurm(["sbatch", "--parsable"], script)
    return answer.strip().splitlines()[-1].split(";")[0]


def _state(job: str) -> dict[str, str]:
    shown = _slurm(["scontrol", "-o", "show", "job", job]).splitlines()[0]
    # values may hold blanks; a name starts each
    return dict(re.findall(r"(\w[\w:/]*)=(.*?)(?= \w[\w:/]*=|$)", shown))


def follow(job: str, pause: float = 0.5) -> int:
    """Copy a job's output to the screen until it ends; returns the job's exit code."""
    seen, last = 0, ""
    while True:
        state = _state(job)
        seen = _copy_new(Path(state.get("StdOut", "/nonexistent")), seen)
        word = state.get("JobState", "").split(" ")[0]
        if word != last:
            print(f"job {job}: {word.lower()}", file=sys.stderr, flush=True)
            last = word
        if word not in _LIVE:
            break
        time.sleep(pause)
    _copy_new(Path(state.get("StdOut", "/nonexistent")), seen)
    code, _, signal = state.get("ExitCode", "0:0").partition(":")
    if int(signal or 0):
        return 128 + int(signal)
    # a job that Slurm ended (cancelled, timed out, lost its host) may still say 0
    return int(code) or (0 if word == "COMPLETED" else 1)


def _copy_new(path: Path, seen: int) -> int:
    """Print what came after the first `seen` bytes; returns how many there are now."""
    try:
        with path.open("rb") as file:
            file.seek(seen)
            new = file.read()
    except FileNotFoundError:
        return seen
    sys.stdout.buffer.write(new)
    sys.stdout.flush()
    return seen + len(new)
