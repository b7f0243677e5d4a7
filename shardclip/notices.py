"""Warnings that come once for each thing they are about, not once a step."""

import warnings

from torch.utils.weak import WeakIdKeyDictionary

_given = WeakIdKeyDictionary()


def warn_once(about: object, message: str) -> None:
    """Warn, unless this was said about this very object before."""
    try:
        said: set[str] = _given.setdefault(about, set())  # type: ignore[no-untyped-call]
    except TypeError:  # a list, say, cannot be remembered: then Python's own filter decides
        said = set()
    if message not in said:
        said.add(message)
        warnings.warn(message, stacklevel=5)
