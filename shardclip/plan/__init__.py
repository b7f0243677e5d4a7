"""What a step needs, worked out once and used until the set of gradients changes.

In come sources with their gradients, out comes a `Plan`. A *seat* is one source's place in it; a
*bucket* is one sum; a *part* is what this rank reads of a tensor that several ranks hold.
"""

from . import cache, exactness, plan
from .exactness import accept, builder
from .plan import Plan, locals_of, readings
from .seats import Seat, cut

__all__ = [
    "Plan",
    "Seat",
    "accept",
    "builder",
    "cache",
    "cut",
    "exactness",
    "locals_of",
    "plan",
    "readings",
]
