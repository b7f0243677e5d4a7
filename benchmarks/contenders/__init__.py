"""Contenders: the ways to clip that are compared, this library's own and others'.

In come the gradients of a case; out goes a ``Clipping``, built once for them and called in every
step. What is timed, and how, is decided by who calls it.
"""

from .baselines import BASELINES
from .clipping import (
    CLIPPED,
    FIRST,
    HEADROOM,
    MANY_MESHES,
    STEPS,
    USUAL,
    Clipping,
    Contender,
    read,
)
from .fitting import CONTENDERS, present
from .ours import OURS

__all__ = [
    "BASELINES",
    "CLIPPED",
    "CONTENDERS",
    "FIRST",
    "HEADROOM",
    "MANY_MESHES",
    "OURS",
    "STEPS",
    "USUAL",
    "Clipping",
    "Contender",
    "present",
    "read",
]
