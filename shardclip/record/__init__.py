"""A run as numbers: one step, the steps so far, a run's file, and where they are sent.

In come finished steps, out come plain Python numbers. All but `Record` works without torch, so that
a run can be drawn on a machine that has none.
"""
