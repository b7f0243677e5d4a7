"""Warnings inside a rank, where they are errors unless a test asks for them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The messages of the block's warnings, filled in when it ends."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught]
