"""Warnings that come once for each thing they are about, not once a step."""

import warnings
import weakref

# By identity: tensors have no plain equality. The references tell a new object at an old address.
_given: dict[int, tuple[weakref.ref[object], set[str]]] = {}


def warn_once(about: object, message: str) -> None:
    """Warn, unless this was said about this very object before."""
    said = _said_about(about)
    if message not in said:
        said.add(message)
        warnings.warn(message, stacklevel=5)


def _said_about(about: object) -> set[str]:
    known = _given.get(id(about))
    if known is not None and known[0]() is about:
        return known[1]
    try:
        reference = weakref.ref(about)
    except TypeError:  # a list, say: then Python's own filter decides
        return set()
    _given[id(about)] = reference, set()
    return _given[id(about)][1]
