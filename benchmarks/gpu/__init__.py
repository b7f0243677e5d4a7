"""One GPU: every path that only a device takes, checked against float64 and timed beside torch.

In comes a device (a CPU runs it dry); out go rows of checks and of times, and a table of them.
"""

from .tables import table

__all__ = ["table"]
