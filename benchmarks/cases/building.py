"""Who builds a layout: its own framework where only that can, else this package, piece by piece."""

from . import frameworks, pieces
from .case import BY_FRAMEWORK, Case
from .gradients import Gradients


def build(case: Case, seed: int) -> Gradients:
    """Build this rank's gradients; every rank must call.

    Raises:
        UnavailableError: The framework that builds the layout is not installed, or cannot.
    """
    if case.layout in BY_FRAMEWORK:
        return frameworks.build(case, seed)
    return pieces.build(case, seed)
