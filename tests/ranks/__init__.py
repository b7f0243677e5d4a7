"""Real Gloo ranks for the tests: a pool of processes that run functions sent to them by name."""

from .collectives import Collective, count_collectives, dtensor_operations
from .gather import everywhere, raised_everywhere, same_everywhere
from .pool import RankError, close_pools, on_ranks, run_on_ranks

__all__ = [
    "Collective",
    "RankError",
    "close_pools",
    "count_collectives",
    "dtensor_operations",
    "everywhere",
    "on_ranks",
    "raised_everywhere",
    "run_on_ranks",
    "same_everywhere",
]
