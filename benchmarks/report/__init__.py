"""The report: tables for a terminal, and RESULTS.md with its pictures.

In come rows of records; out goes text, and files beside it. Nothing is measured here, and what the
report says is in the records alone.
"""

from . import tables, targets
from .results import latest, main, report

__all__ = ["latest", "main", "report", "tables", "targets"]
