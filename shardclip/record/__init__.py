"""A run as numbers: one step, the steps so far, a run's file, and where they are sent.

In come finished steps, out come plain Python numbers. All but `Record` works without torch, so that
a run can be drawn on a machine that has none.
"""

import importlib
from typing import TYPE_CHECKING

from . import run_file
from .outcome import Heading, Outcome, combine
from .run_file import Run, RunFileError, read

if TYPE_CHECKING:
    from .record import Record

__all__ = ["Heading", "Outcome", "Record", "Run", "RunFileError", "combine", "read", "run_file"]


def __getattr__(name: str) -> object:
    if name != "Record":  # it needs torch: loaded when it is used
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.record").Record
