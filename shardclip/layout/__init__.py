"""Who holds which elements: from what the caller hands over to owners and replicas.

In come modules, tensors, meshes and placements; out come *sources* (named parameters and where
their gradients are) and which rank counts, and reads, which of their elements. `adapters` know the
frameworks' tensors; `ownership` is pure geometry.
"""

from . import adapters, trees
from .adapters import Read, deepspeed, deepspeed_step, dtensor, megatron
from .ownership import Ownership, Shares, segment
from .param_groups import grouped
from .planner import Planner, Settled
from .sources import (
    Layout,
    Source,
    clean,
    gradient,
    may_have_gradient,
    notice_if_used_up,
    of_iterable,
    refuse_gradients,
    unique,
)

__all__ = [
    "Layout",
    "Ownership",
    "Planner",
    "Read",
    "Settled",
    "Shares",
    "Source",
    "adapters",
    "clean",
    "deepspeed",
    "deepspeed_step",
    "dtensor",
    "gradient",
    "grouped",
    "may_have_gradient",
    "megatron",
    "notice_if_used_up",
    "of_iterable",
    "refuse_gradients",
    "segment",
    "trees",
    "unique",
]
