"""JSON lines, in the format of ``shardclip.run_file``."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardclip.record import run_file
from shardclip.record.outcome import Outcome

from .sink import Sink


class JsonLines(Sink):
    """Append one JSON object a step to a file, which ``shardclip plot`` and its like read.

    The format is described in ``shardclip.run_file``. Each line is handed to the operating system
    whole and at once, so that a crash of the program loses none. A file that is there already is
    continued: after a restart from a checkpoint, steps done again count as done the second time.

    Args:
        path: The file; one process alone may write it, rank 0 say. Its folder is made.
        run: The run's name, in pictures; None: the file's.
        meta: What else to keep in the header: learning rate, world size, ...
        every: As in ``Sink``.
        norms_every: As in ``Sink``; here every step by default, as the pictures show them.
        fsync: Wait after every line until it is on the disk, to outlive a crash of the machine.

    Raises:
        OSError: The file cannot be opened.
        TypeError: ``meta`` holds what JSON has no word for; at the first step.
        ValueError: As in ``Sink``.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        run: str | None = None,
        meta: Mapping[str, Any] | None = None,
        every: int = 1,
        norms_every: int = 1,
        fsync: bool = False,
    ) -> None:
        super().__init__(every=every, norms_every=norms_every)
        self.path = Path(path)
        self._name, self._meta, self._fsync = run or self.path.stem, meta or {}, fsync
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b", buffering=0)
        self._started = False

    def _put(self, step: Outcome, *, norms: bool) -> None:
        lines = run_file.step_line(step, norms=norms) + "\n"
        if not self._started:
            head = run_file.header_line(self._name, step.norm_type, self._meta)
            lines = f"{self._mended()}{head}\n{lines}"
            self._started = True
        rest = memoryview(lines.encode())
        while rest:  # a full disk may take a part, before it says so
            rest = rest[self._file.write(rest) :]
        if self._fsync:
            os.fsync(self._file.fileno())

    def _mended(self) -> str:
        """Return what ends a line that a crash has cut."""
        if self._file.seek(0, os.SEEK_END) == 0:
            return ""
        self._file.seek(-1, os.SEEK_END)
        return "" if self._file.read(1) == b"\n" else "\n"

    def close(self) -> None:
        """Close the file."""
        self._file.close()
