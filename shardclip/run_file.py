"""A run's file, as users import it."""

from .record.run_file import Run, RunFileError, read

__all__ = ["Run", "RunFileError", "read"]
