"""Counting: what a call does on one rank, seen operator by operator.

In comes a block of code and the tensors whose memory is told apart; out go ``Counts``: collectives,
bytes, reads by the host. Nothing here knows of cases or of who clips.
"""

from .device_path import as_on_a_device
from .operators import Counts, counting

__all__ = ["Counts", "as_on_a_device", "counting"]
