"""ZeroRedundancyOptimizer, as users import it."""

from shardclip.layout.adapters.zero_redundancy import layout

__all__ = ["layout"]
