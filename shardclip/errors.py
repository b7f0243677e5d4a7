"""The errors that are shardclip's own, and any error in a form that travels between ranks."""


class NonFiniteGradientError(RuntimeError):
    """The norm is NaN or infinite; raised on every rank alike, with the gradients untouched."""


class ReplicaMismatchError(RuntimeError):
    """Tensors that should be copies of one another differ between ranks.

    Raised on every rank alike, with the gradients untouched. The message names the parameters, the
    ranks and the mend.
    """


def problem(name: str, error: Exception) -> tuple[str, str]:
    """Put an error into a form that travels: its type and text."""
    kind = type(error).__name__
    own = isinstance(error, (ValueError, TypeError))
    return kind, f"{name}: {error}" if own else f"{name}: {kind}: {error}"
