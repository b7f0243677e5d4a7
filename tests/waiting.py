"""Waiting for what other processes do: no single look, and a deadline that only faults reach."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 180.0
"""Under load a process takes half a minute to import torch, and a Slurm job a minute to start."""


def wait_for(
    condition: Callable[[], T],
    told: Callable[[], object] = lambda: "",
    seconds: float = PATIENCE_S,
) -> T:
    """Ask until the condition returns something true, and return that.

    Past the deadline it is an error, with what ``told`` returns.
    """
    end = time.monotonic() + seconds
    while True:
        late = time.monotonic() > end  # looked up first: a starved test asks once more
        if found := condition():
            return found
        if late:
            raise AssertionError(f"waited {seconds:g} s in vain: {told()}")
        time.sleep(0.02)


def text_of(path: Path) -> str:
    """Read what a file holds so far; nothing while it is not there."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
