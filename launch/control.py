"""The line between a host's launcher and its guards: a socket in a private directory.

Lines of JSON. A guard says `hello` and `failed`; the launcher says `notice`, `end` and `seen`.
The end of the line tells a guard that its launcher died.
"""

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .failure import Failure

Events = queue.SimpleQueue[tuple[str, object]]


class GuardLink:
    """A guard's end of the line."""

    def __init__(self, path: str, events: Events) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._events = events
        self._seen = threading.Event()

    def start(self, local_rank: int) -> None:
        """Say hello and queue what the launcher says."""
        self._send({"hello": local_rank})
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._events.put(("orphaned", None))

    def _listen(self) -> None:
        try:
            for line in self._socket.makefile("rb"):
                for kind, value in json.loads(line).items():
                    if kind == "seen":
                        self._seen.set()
                    else:
                        self._events.put((kind, value))
        except OSError:
            pass
        self._seen.set()
        self._events.put(("orphaned", None))

    def report(self, failure: Failure, patience: float = 8.0) -> None:
        """Report a failure and wait until it is recorded, so that it precedes its followers."""
        self._send({"failed": failure.dumps()})
        self._seen.wait(patience)


class ControlServer:
    """The launcher's end of the lines to all guards of its host."""

    def __init__(self, path: Path, on_failure: Callable[[Failure], None]) -> None:
        """Listen at the path.

        Args:
            path: the socket, in a directory that is this user's alone.
            on_failure: called in a thread with each failure; the guard waits for its return.
        """
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen(256)
        self._on_failure = on_failure
        self._mutex = threading.Lock()
        self._guards: dict[socket.socket, int] = {}
        self._said: list[dict[str, Any]] = []
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    @property
    def connected(self) -> int:
        """How many guards are on the line."""
        return len(self._guards)

    def tell(self, message: dict[str, Any], *, keep: bool) -> None:
        """Tell all guards; kept messages are repeated to those that come later."""
        with self._mutex:
            if keep:
                self._said.append(message)
            for guard in self._guards:
                _write(guard, message)

    def _accept(self) -> None:
        while True:
            guard, _ = self._server.accept()
            threading.Thread(target=self._serve, args=(guard,), daemon=True).start()

    def _serve(self, guard: socket.socket) -> None:
        try:
            for line in guard.makefile("rb"):
                message = json.loads(line)
                if "hello" in message:
                    with self._mutex:
                        self._guards[guard] = message["hello"]
                        for said in self._said:
                            _write(guard, said)
                if "failed" in message:
                    self._on_failure(Failure.loads(message["failed"]))
                    _write(guard, {"seen": True})
        except OSError:
            pass
        finally:
            with self._mutex:
                self._guards.pop(guard, None)
            guard.close()


def _write(guard: socket.socket, message: dict[str, Any]) -> None:
    # where the guard has gone, its own thread sees the end of the line
    with contextlib.suppress(OSError):
        guard.sendall(json.dumps(message).encode() + b"\n")
