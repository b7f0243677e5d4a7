"""Pure mathematics: norms, coefficients, exact sums, digits and fingerprints.

In come numbers and tensors, out come numbers and tensors: nothing here knows of ranks, parameters
or plans.
"""
