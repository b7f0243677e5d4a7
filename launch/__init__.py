"""Start the same training script on one machine, on several hosts, and under Slurm.

The command is `shardclip-launch` (also `python -m shardclip.launch`); a training script uses
`init_distributed` and `StopSignal`. Importing this package does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .environment import Placement, detect
    from .process_group import init_distributed
    from .stop import StopSignal

_HOME = {
    "Placement": "environment",
    "StopSignal": "stop",
    "detect": "environment",
    "init_distributed": "process_group",
}

__all__ = ["Placement", "StopSignal", "detect", "init_distributed"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardclip.launch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
