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
    from .clipping.agc import AdaptiveGradClipper, adaptive_clip_grad_
    from .clipping.clipper import GradClipper
    from .clipping.functions import (
        clip_by_global_norm,
        clip_grad_norm_,
        clip_grads_with_norm_,
        get_total_norm,
        global_norm,
    )
    from .clipping.per_tensor import PerTensorClipper, clip_grad_per_tensor_norm_
    from .clipping.value import clip_grad_value_
    from .comm.reduce import SELF
    from .errors import NonFiniteGradientError, ReplicaMismatchError
    from .step.result import ClipResult

# Loaded on first use, so that `import shardclip` never imports torch (login nodes have none).
_HOME = {
    "adaptive_clip_grad_": "clipping.agc",
    "clip_by_global_norm": "clipping.functions",
    "clip_grad_norm_": "clipping.functions",
    "clip_grad_per_tensor_norm_": "clipping.per_tensor",
    "clip_grad_value_": "clipping.value",
    "clip_grads_with_norm_": "clipping.functions",
    "get_total_norm": "clipping.functions",
    "global_norm": "clipping.functions",
    "AdaptiveGradClipper": "clipping.agc",
    "GradClipper": "clipping.clipper",
    "PerTensorClipper": "clipping.per_tensor",
    "ClipResult": "step.result",
    "NonFiniteGradientError": "errors",
    "ReplicaMismatchError": "errors",
    "SELF": "comm.reduce",
}

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
    if name not in _HOME:
        raise AttributeError(f"module 'shardclip' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # or a type checker would take any name, a misspelt one as well
    __getattr__ = _found


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
