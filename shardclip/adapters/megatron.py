"""Megatron-core's conventions, as users import them."""

from shardclip.layout.adapters.megatron import layout, read

__all__ = ["layout", "read"]
