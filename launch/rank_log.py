"""Copies what a rank prints to its log file and, whole lines only, to the screen."""

import fcntl
import os
import re
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO

_KEPT = 200
# a progress bar ends its line with a carriage return alone
_LINE_END = re.compile(rb"\r\n|\n|\r")


class RankLog:
    """A rank's log file, shared by its two streams, and its share of the screen."""

    def __init__(self, path: Path, screen_lock: Path | None, prefix: str | None) -> None:
        """Open the log.

        Args:
            path: the file; appended to.
            screen_lock: locked while a line is written, so that ranks of a host take turns.
            prefix: stands before each line on screen; None: nothing goes to the screen.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._screen_lock = screen_lock.open("ab") if screen_lock else None
        self._prefix = None if prefix is None else prefix.encode()
        self._mutex = threading.Lock()
        self.errors: deque[str] = deque(maxlen=_KEPT)

    def pump(self, stream: BinaryIO, screen: int, keep: bool) -> None:
        """Copy a stream until its end.

        Args:
            stream: the rank's standard output or error.
            screen: the file descriptor that shows it.
            keep: remember its last lines for the report of a failure.
        """
        rest = b""
        while chunk := os.read(stream.fileno(), 65536):
            rest += chunk
            begin = 0
            for match in _LINE_END.finditer(rest):
                self._line(rest[begin : match.end()], screen, keep)
                begin = match.end()
            rest = rest[begin:]
        if rest:
            self._line(rest + b"\n", screen, keep)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._screen_lock:
            self._screen_lock.close()

    def _line(self, line: bytes, screen: int, keep: bool) -> None:
        with self._mutex:
            self._file.write(line)
        if keep:
            self.errors.append(line.decode(errors="replace").rstrip())
        if self._prefix is not None:
            self._show(self._prefix + line, screen)

    def _show(self, line: bytes, screen: int) -> None:
        if self._screen_lock:
            fcntl.flock(self._screen_lock, fcntl.LOCK_EX)
        try:
            while line:
                line = line[os.write(screen, line) :]
        except OSError:
            # the reader of the screen has gone; the log goes on
            self._prefix = None
        finally:
            if self._screen_lock:
                fcntl.flock(self._screen_lock, fcntl.LOCK_UN)


def log_name(host: str, rank: int, attempt: str) -> str:
    """Name a rank's log: unique by host, rank and restart."""
    return f"{host}-rank{rank}-restart{attempt}.log"
