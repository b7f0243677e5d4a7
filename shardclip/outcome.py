"""One step in plain numbers, as users import it."""

from .record.outcome import Outcome

__all__ = ["Outcome"]
