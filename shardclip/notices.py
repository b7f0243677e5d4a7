"""Warnings that come once for each thing they are about, not once a step."""

import warnings

_given: set[tuple[int, str]] = set()


def warn_once(about: object, message: str) -> None:
    """Warn, unless this was said about this very object before."""
    key = (id(about), message)
    if key not in _given:
        _given.add(key)
        warnings.warn(message, stacklevel=5)
