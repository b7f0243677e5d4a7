"""As users import it."""

from shardclip.layout.adapters.megatron import layout

__all__ = ["layout"]
