"""Records: what is kept of a run, one JSON line for each thing measured, and the files themselves.

In come rows, of any of the commands; out go the same rows, the latest of each measurement. The
files are never rewritten: a run adds to them.
"""

from benchmarks.measuring.rows import (
    HERE,
    KEPT,
    Row,
    default_path,
    latest,
    load,
    machine,
    ours,
    quartiles,
    rows,
    write,
)

__all__ = [
    "HERE",
    "KEPT",
    "Row",
    "default_path",
    "latest",
    "load",
    "machine",
    "ours",
    "quartiles",
    "rows",
    "write",
]
