"""The proof that copies are copies, and the comparison of all their bits.

In come tensors that several ranks hold, out come lanes whose sum over the ranks tells whether they
are the same. `samples` chooses values by a tensor's shape, `proof` folds them into the *slot* of
lanes that is the tensor's own; `bits` compares everything.
"""

from . import bits, proof, samples
from .bits import Drift
from .proof import SKETCH, Copy, Proof

__all__ = ["SKETCH", "Copy", "Drift", "Proof", "bits", "proof", "samples"]
