"""The true global gradient norm under any sharding, with one all-reduce."""

import importlib
import os
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from . import adapters as adapters
    from . import adaptive as adaptive
    from . import integrations as integrations
    from . import logging as logging
    from . import outcome as outcome
    from . import pictures as pictures
    from . import record as record
    from . import run_file as run_file
    from .clipping import (
        AdaptiveGradClipper,
        GradClipper,
        PerTensorClipper,
        adaptive_clip_grad_,
        clip_by_global_norm,
        clip_grad_norm_,
        clip_grad_per_tensor_norm_,
        clip_grad_value_,
        clip_grads_with_norm_,
        get_total_norm,
        global_norm,
    )
    from .comm import SELF
    from .errors import NonFiniteGradientError, ReplicaMismatchError
    from .step import ClipResult

# Loaded on first use, so that `import shardclip` never imports torch (login nodes have none).
_HOME = {
    "ClipResult": "step",
    "NonFiniteGradientError": "errors",
    "ReplicaMismatchError": "errors",
    "SELF": "comm",
}
"""Where a public name is found; the others in `clipping`."""

_MODULES = frozenset(
    {
        "adapters",
        "adaptive",
        "integrations",
        "launch",
        "logging",
        "outcome",
        "pictures",
        "record",
        "run_file",
    }
)

__all__ = [
    "SELF",
    "AdaptiveGradClipper",
    "ClipResult",
    "GradClipper",
    "NonFiniteGradientError",
    "PerTensorClipper",
    "ReplicaMismatchError",
    "__version__",
    "adaptive_clip_grad_",
    "clip_by_global_norm",
    "clip_grad_norm_",
    "clip_grad_per_tensor_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "global_norm",
]


if not os.path.isdir(os.path.join(os.path.dirname(__file__), "launch")):
    from . import _checkout  # noqa: F401 - there `shardclip.launch` must be found, too


def _found(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module 'shardclip' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME.get(name, 'clipping')}", __name__), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # or a type checker would take any name, a misspelt one as well
    __getattr__ = _found


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
