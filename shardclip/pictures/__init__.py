"""A run, drawn: ``shardclip plot``, ``shardclip report`` and ``shardclip suggest``."""
