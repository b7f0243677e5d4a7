"""Rows of a Weights & Biases run, shared with everybody else who logs to it."""

import importlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("shardclip")
_MANY = 1000

Row = dict[str, Any]


class SharedRows:
    """Puts rows into those that others write, and never begins one while the run goes on.

    A run has one counter of rows, wandb's step. ``log(..., step=)`` with a number below it is
    dropped, so whoever logs a row of his own may lose another's. ``commit=False`` only adds to the
    row under way. One row has place for one of ours: the next comes when somebody has moved the
    counter on. What found no place is written when the run finishes, after everybody else.

    Args:
        run: The run.
        make: What is put, as a row; called when it is written.

    Raises:
        RuntimeError: This wandb has no way to write at the end.
    """

    def __init__(self, run: Any, make: Callable[[Any], Row]) -> None:
        self._run, self._make = run, make
        self._waiting: deque[Any] = deque()
        self._taken: int | None = None  # the row that has one of ours
        self._newest: Any = None
        self._said = False
        _before_finish(run, self._write_rest)

    def put(self, step: Any) -> None:
        """Write a step if the row under way has place, else let it wait.

        Where one step at most is behind, they go in order: so it is if a loop logs with ``step=``
        after ``clip_()``. Else the newest goes first, so that what is watched is of now.
        """
        self._newest = step
        self._waiting.append(step)
        row = self._under_way()
        if row is not None and row != self._taken:
            behind = len(self._waiting) > 2
            chosen = self._waiting.pop() if behind else self._waiting.popleft()
            self._run.log(self._make(chosen), commit=False)
            self._taken = row
        elif len(self._waiting) > _MANY and not self._said:
            self._said = True
            _log.warning(
                "%d steps wait to be written when the Weights & Biases run finishes, as it is "
                "logged to less often than gradients are clipped. Write fewer with every=, or "
                "give commit=True if nothing else is logged with step=",
                len(self._waiting),
            )

    def _under_way(self) -> int | None:
        """Return the number of the row under way; None where wandb's service is too busy."""
        try:
            return int(self._run.step)
        except TimeoutError:
            return None

    def _write_rest(self) -> None:
        if not self._waiting:
            return
        if self._under_way() == self._taken:
            self._run.log({}, commit=True)  # the row that has one of ours already
        while self._waiting:
            self._run.log(self._make(self._waiting.popleft()), commit=True)
        self._run.summary.update(self._make(self._newest))  # else of the step written last


def _before_finish(run: Any, call: Callable[[], None]) -> None:
    """Have something called when a run finishes, by ``finish()``, ``with`` or the program's end."""
    try:
        runs = importlib.import_module("wandb.sdk.wandb_run")
        run._teardown_hooks.append(runs.TeardownHook(call, runs.TeardownStage.EARLY))
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"this version of wandb cannot be told to write at the end of a run ({error}); use "
            "another one, or give commit=True if nothing else is logged with step="
        ) from error
