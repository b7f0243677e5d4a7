"""What users call: the functions, `GradClipper`, and clipping by value, tensor or unit.

In come a caller's parameters and settings; each name here is re-exported by `shardclip`.
"""
