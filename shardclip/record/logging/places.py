"""Who writes where: two sinks under the same names would mix their values."""

import warnings
from weakref import WeakValueDictionary

_claimed: "WeakValueDictionary[tuple[str, str], object]" = WeakValueDictionary()


def claim(sink: object, place: str, prefix: str) -> None:
    """Warn if a sink that is still open writes under the same names to the same place.

    Args:
        sink: The new one; it holds the names from now on.
        place: A folder, or a run.
        prefix: Of the names.
    """
    if (place, prefix) in _claimed:
        warnings.warn(
            f"another {type(sink).__name__} writes {prefix}/... to {place} already, so the values "
            "of both mix; give each clipper's sink a prefix= of its own, or close the first",
            stacklevel=3,
        )
    _claimed[place, prefix] = sink


def release(sink: object) -> None:
    """Give up the names that a sink holds."""
    for key in [key for key, holder in _claimed.items() if holder is sink]:
        del _claimed[key]
