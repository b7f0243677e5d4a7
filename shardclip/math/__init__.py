"""Pure mathematics: norms, coefficients, exact sums, digits and fingerprints.

In come numbers and tensors, out come numbers and tensors: nothing here knows of ranks, parameters
or plans.
"""

from . import exact, fingerprints, norm, windows
from .digits import ALONE, Digits
from .norm import check_max_norm, is_maximum
from .windows import DOUBLE, SINGLE, Window, check_capacity

__all__ = [
    "ALONE",
    "DOUBLE",
    "SINGLE",
    "Digits",
    "Window",
    "check_capacity",
    "check_max_norm",
    "exact",
    "fingerprints",
    "is_maximum",
    "norm",
    "windows",
]
