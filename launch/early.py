"""What a rank does with notices before its script listens: `startup/` holds them back."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from . import variables as names


def holding(environ: Mapping[str, str], notices: Iterable[int]) -> dict[str, str]:
    """Return the variables with which Python holds these signals back from its first line on.

    They are gone again before the script runs: neither it nor what it starts sees them.
    """
    path = [str(Path(__file__).resolve().with_name("startup"))]
    if environ.get("PYTHONPATH"):
        path.append(environ["PYTHONPATH"])
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(path),
        names.HELD: ",".join(str(int(number)) for number in notices),
    }
