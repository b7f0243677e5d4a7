"""Records: what is kept of a run, one JSON line for each thing measured, and the files themselves.

In come rows, of any of the commands; out go the same rows, the latest of each measurement, and a
description of the machine to keep with them. The files are never rewritten: a run adds to them.
"""

from .files import HERE, KEPT, Row, default_path, latest, load, write
from .provenance import machine

__all__ = ["HERE", "KEPT", "Row", "default_path", "latest", "load", "machine", "write"]
