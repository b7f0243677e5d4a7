"""All that travels between ranks: the payload of the one all-reduce, and what sends it.

In come this rank's numbers, out come those of all ranks together. A *lane* is one number of the
payload. Only `reduce` calls a collective; `missing_ranks` names who did not take part in one.
"""
