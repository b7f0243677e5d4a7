"""Host training loops: the loop keeps its lines, shardclip does the clipping.

Each file belongs to one framework and imports it; nothing here is imported before it is asked for.
"""
