"""One step: collect the gradients, sum, reduce, judge, scale, report.

In come gradients and a plan, out comes a `ClipResult`, the same on every rank.
"""

from . import agreement, inspection, loss_scaling, optimizers, uneven_inputs, verdict
from .collect import Collector
from .measure import Measured, start
from .optimizers import parameters_of
from .pending import Begun, Judged, Pending
from .result import ClipResult
from .scale import scale_
from .single import measure_once, rounded
from .skips import Skips
from .strays import Strays

__all__ = [
    "Begun",
    "ClipResult",
    "Collector",
    "Judged",
    "Measured",
    "Pending",
    "Skips",
    "Strays",
    "agreement",
    "inspection",
    "loss_scaling",
    "measure_once",
    "optimizers",
    "parameters_of",
    "rounded",
    "scale_",
    "start",
    "uneven_inputs",
    "verdict",
]
