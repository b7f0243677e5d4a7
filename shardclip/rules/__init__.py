"""Thresholds: what each param group is clipped by, and the rules that follow the norm.

In come a step's norms, out come coefficients, as tensors on the device.
"""

from . import thresholds
from .thresholds import Limit, Rule

__all__ = ["Limit", "Rule", "thresholds"]
