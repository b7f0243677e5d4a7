"""A fault of torch's that is none of a program's: it aborts now and then while Python ends."""

from collections.abc import Callable
from subprocess import CompletedProcess

RUNS = 3
SAID = "terminate called without an active exception"


def run_through(start: Callable[[], CompletedProcess[str]]) -> CompletedProcess[str]:
    """Run a program of several ranks to its end, and again where torch has aborted it.

    A thread of Gloo's that gives back a tensor when Python is ending takes the process with it
    (exit code -6), after all of its work; scripts without this library do the same, the more so on
    a busy machine. Three times in a row is another fault, and the caller's to find.
    """
    for _ in range(RUNS):
        done = start()
        if done.returncode == 0 or SAID not in done.stderr:
            break
    return done
