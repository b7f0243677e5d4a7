"""Measuring: times and counts of every contender, on the same gradients and in the same processes.

In come cases and how much to measure; processes are started, and out go ``Measurement`` objects
with each call's time on its slowest rank, its counts and the error of its norm.
"""

from .measurement import Measurement
from .ranks import Settings
from .rounds import Found, Plan, measure, prepare, rounds_of, together

__all__ = [
    "Found",
    "Measurement",
    "Plan",
    "Settings",
    "measure",
    "prepare",
    "rounds_of",
    "together",
]
