"""The adapters that users name themselves; the code lies in `layout/adapters`."""

from . import megatron, torchtitan, zero_redundancy

__all__ = ["megatron", "torchtitan", "zero_redundancy"]
