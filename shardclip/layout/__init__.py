"""Who holds which elements: from what the caller hands over to owners and replicas.

In come modules, tensors, meshes and placements; out come *sources* (named parameters and where
their gradients are) and which rank counts, and reads, which of their elements. `adapters` know the
frameworks' tensors; `ownership` is pure geometry.
"""
