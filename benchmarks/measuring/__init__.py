"""Measuring: times and counts of every contender, on the same gradients and in the same processes.

In come cases and how much to measure; processes are started, and out go rows with each call's time
on its slowest rank, its ratio to the baseline's, its counts and the error of its norm.
"""

from .ranks import Settings
from .rounds import Plan, measure, prepare, rounds_of, together
from .rows import ours, quartiles, rows_of

__all__ = [
    "Plan",
    "Settings",
    "measure",
    "ours",
    "prepare",
    "quartiles",
    "rounds_of",
    "rows_of",
    "together",
]
