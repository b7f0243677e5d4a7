"""One step: collect the gradients, sum, reduce, judge, scale, report.

In come gradients and a plan, out comes a `ClipResult`, the same on every rank.
"""

from . import loss_scaling, optimizers, uneven_inputs, verdict
from .collect import Collector
from .cycle import Cycle
from .measure import Measured
from .optimizers import parameters_of
from .pending import Judged, Pending
from .result import ClipResult
from .scale import scale_
from .settings import ClipSettings
from .single import measure_once, rounded
from .skips import Skips
from .strays import NO_GRADIENTS, Strays

__all__ = [
    "NO_GRADIENTS",
    "ClipResult",
    "ClipSettings",
    "Collector",
    "Cycle",
    "Judged",
    "Measured",
    "Pending",
    "Skips",
    "Strays",
    "loss_scaling",
    "measure_once",
    "optimizers",
    "parameters_of",
    "rounded",
    "scale_",
    "uneven_inputs",
    "verdict",
]
