"""What this library costs, beside what a user would call instead.

- ``python -m benchmarks``: cases x ways to clip, timed and counted; ``--targets``, ``--case``
- ``python -m benchmarks.scale``: plans of thousands of ranks, measured; latency, modelled
- ``python -m benchmarks.gpu``: every path of one GPU, checked and timed
- ``python -m benchmarks.report``: RESULTS.md and its pictures, from the records

`cases` (gradients of a layout), `counting` and `records` know nothing of one another; `contenders`
clip the gradients of a case, `measuring` measures them, and `report` shows the rows.
"""
