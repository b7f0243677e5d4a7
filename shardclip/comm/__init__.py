"""All that travels between ranks: the payload of the one all-reduce, and what sends it.

In come this rank's numbers, out come those of all ranks together. A *lane* is one number of the
payload. Only `reduce` calls a collective; `missing_ranks` names who did not take part in one.
"""

from . import messages, reduce
from .payload import Flags, Lanes
from .reduce import SELF, Group
from .world import World

__all__ = ["SELF", "Flags", "Group", "Lanes", "World", "messages", "reduce"]
