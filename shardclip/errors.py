"""The errors that are shardclip's own."""


class NonFiniteGradientError(RuntimeError):
    """The norm is NaN or infinite; raised on every rank alike, with the gradients untouched."""


class ReplicaMismatchError(RuntimeError):
    """Tensors that should be copies of one another differ between ranks.

    Raised on every rank alike, with the gradients untouched. The message names the parameters, the
    ranks and the mend.
    """
