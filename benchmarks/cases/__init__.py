"""Cases: gradients that are clipped, of one layout, made on each rank.

In comes a name as a user types it (`fsdp2/layers@2`); out go a ``Case`` and, rank by rank, its
``Gradients``: the parameters, what they hold, and their true norm. Nothing here knows who clips.
"""

from .building import build
from .case import ALL, DEFAULT, DTYPES, LAYOUTS, QUICK, TARGETED, Case, parse, quick
from .gradients import Gradients, UnavailableError
from .shapes import LLAMA_8B, LLAMA_70B, LLAMA_405B, SHAPES, Llama, Shape, Shapes, tiny

__all__ = [
    "ALL",
    "DEFAULT",
    "DTYPES",
    "LAYOUTS",
    "LLAMA_8B",
    "LLAMA_70B",
    "LLAMA_405B",
    "QUICK",
    "SHAPES",
    "TARGETED",
    "Case",
    "Gradients",
    "Llama",
    "Shape",
    "Shapes",
    "UnavailableError",
    "build",
    "parse",
    "quick",
    "tiny",
]
