"""What a step needs, worked out once and used until the set of gradients changes.

In come sources with their gradients, out comes a `Plan`. A *seat* is one source's place in it; a
*bucket* is one sum; a *part* is what this rank reads of a tensor that several ranks hold.
"""
