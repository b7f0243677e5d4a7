"""Starts, watches and ends processes; the only file that creates a rank."""

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from .errors import LaunchError
from .rank_log import RankLog

_PR_SET_PDEATHSIG = 1
WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
           signal.SIGUSR2)  # fmt: skip
"""Signals that guard and launcher read from a queue; none ends them."""

Events = queue.SimpleQueue[tuple[str, object]]


def block_signals() -> None:
    """Block the watched signals in this thread and those it starts; call it first."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)


def watch_signals(events: Events) -> None:
    """Queue each watched signal with its sender, whatever handlers a library installs."""

    def wait() -> None:
        while True:
            info = signal.sigwaitinfo(WATCHED)
            events.put(("signal", (info.si_signo, info.si_pid)))

    threading.Thread(target=wait, name="signals", daemon=True).start()


class RankProcess:
    """A rank: a process that leads its own group."""

    def __init__(self, process: subprocess.Popen[bytes], pumps: list[threading.Thread]) -> None:
        self._process = process
        self._pumps = pumps

    def watch(self, events: Events) -> None:
        """Queue the rank's end."""

        def wait() -> None:
            events.put(("exited", self._process.wait()))

        threading.Thread(target=wait, name="rank", daemon=True).start()

    def send(self, number: signal.Signals) -> None:
        """Signal the rank alone: its data loaders are in its group, and are not to know."""
        if self._process.poll() is None:
            os.kill(self._process.pid, number)

    def kill_group(self) -> None:
        """End the rank and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def catches(self, number: signal.Signals) -> bool:
        """Tell whether the rank has a handler for the signal."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return True
        mask = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(mask.split()[1], 16) >> (number - 1) & 1)

    def drain(self, patience: float = 2.0) -> None:
        """Wait for the last output; a child that still holds the pipes is not waited for."""
        end = time.monotonic() + patience
        for pump in self._pumps:
            pump.join(max(0.0, end - time.monotonic()))


def start_rank(
    command: Sequence[str], environ: dict[str, str], ignored: Iterable[int], log: RankLog
) -> RankProcess:
    """Start a rank that dies with this process.

    Args:
        command: program and arguments.
        environ: its variables.
        ignored: the signals that it starts with ignored; left so, its children ignore them too.
        log: takes what it prints.

    Raises:
        LaunchError: the program cannot be started; the message says why.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        os.setpgid(0, 0)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # the guard may have died before that took hold
            if os.getppid() != parent:
                os._exit(137)

    try:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=prepare,  # noqa: PLW1509 - the guard has no thread yet
        )
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]!r}: {error}") from error
    pumps = [
        threading.Thread(target=log.pump, args=(process.stdout, 1, False), daemon=True),
        threading.Thread(target=log.pump, args=(process.stderr, 2, True), daemon=True),
    ]
    for pump in pumps:
        pump.start()
    return RankProcess(process, pumps)


def spread(nnodes: int) -> int:
    """Start this same command again on every host of the allocation, by srun.

    Raises:
        LaunchError: srun is not there.
    """
    environ = dict(os.environ)
    share = environ.get("SLURM_CPUS_PER_TASK") or environ.get("SLURM_CPUS_ON_NODE")
    if share:
        # since Slurm 22.05 srun does not inherit --cpus-per-task
        environ.setdefault("SRUN_CPUS_PER_TASK", share)
    command = [
        "srun", f"--nodes={nnodes}", f"--ntasks={nnodes}", "--ntasks-per-node=1",
        "--kill-on-bad-exit=0", sys.executable, "-m", "shardclip.launch", *sys.argv[1:],
    ]  # fmt: skip
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise LaunchError(
            f"cannot start srun ({error}): in an allocation the hosts are reached through it"
        ) from error
