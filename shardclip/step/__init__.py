"""One step: collect the gradients, sum, reduce, judge, scale, report.

In come gradients and a plan, out comes a `ClipResult`, the same on every rank.
"""
