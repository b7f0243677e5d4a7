"""torchtitan, as users import it."""

from shardclip.layout.adapters.torchtitan import layout

__all__ = ["layout"]
