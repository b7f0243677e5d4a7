"""Where ranks come from: one process that has imported torch once and forks at every request.

It is a clean process (not pytest's), has one thread and no process group, so that forking it is
safe, and a new pool of ranks costs a fraction of a second.
"""

import importlib
import os
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = "SHARDCLIP_RANKS_PRELOAD"  # names a module to import before any rank is forked
COMMAND = "from tests.ranks import nursery; nursery.main"


class Nursery:
    """The parent's handle on it."""

    _running: ClassVar["Nursery | None"] = None

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{COMMAND}({theirs.fileno()})"],
            cwd=ROOT,
            env=_environment(),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    @classmethod
    def get(cls) -> "Nursery":
        if cls._running is None or cls._running.process.poll() is not None:
            cls._running = cls()
        return cls._running

    @classmethod
    def close(cls) -> None:
        """End it; it has no ranks any more."""
        if cls._running is not None:
            cls._running.pipe.close()
            cls._running.process.wait()
            cls._running = None

    def fork(self, pipe: Connection, arguments: tuple) -> int:
        """Start a rank that talks through this pipe; its process id."""
        self.pipe.send(("fork", arguments))
        send_handle(self.pipe, pipe.fileno(), self.process.pid)
        pipe.close()
        return self.pipe.recv()

    def reap(self, pid: int) -> int:
        """Wait for a rank that is dead or dying; its exit code, negative for a signal."""
        self.pipe.send(("reap", (pid,)))
        return self.pipe.recv()


def _environment() -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        # Gloo would look the host's name up, which sandboxes often cannot.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def main(descriptor: int) -> None:
    from . import worker  # imports torch, and with it everything the ranks need

    if PRELOAD in os.environ:
        importlib.import_module(os.environ[PRELOAD])
    control = Connection(descriptor)
    while True:
        try:
            what, arguments = control.recv()
        except EOFError:  # the parent is gone or done
            os._exit(0)  # an orderly end would take a second
        if what == "reap":
            control.send(os.waitstatus_to_exitcode(os.waitpid(*arguments, 0)[1]))
            continue
        descriptor = recv_handle(control)
        pid = os.fork()
        if pid == 0:
            control.close()
            worker.main(Connection(descriptor), *arguments)
            os._exit(0)
        os.close(descriptor)
        control.send(pid)
