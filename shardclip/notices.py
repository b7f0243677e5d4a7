"""Warnings that point at the user's line, and come once for each thing they are about."""

import sys
import warnings
from pathlib import Path

import torch
from torch.utils.weak import WeakIdKeyDictionary

_given = WeakIdKeyDictionary()
_BETWEEN = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
"""Folders whose frames lie between the user's line and the warning: ours, and torch's wrappers."""


def warn_once(about: object, message: str) -> None:
    """Warn, unless this was said about this very object before."""
    try:
        said: set[str] = _given.setdefault(about, set())  # type: ignore[no-untyped-call]
    except TypeError:  # a list, say, cannot be remembered: then Python's own filter decides
        said = set()
    if message not in said:
        said.add(message)
        warn(message)


def warn(message: str) -> None:
    """Warn of the line outside shardclip that has called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
