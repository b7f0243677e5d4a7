"""Runs one rank: keeps its log, brings it notices, ends it, and reports how it failed.

One guard stands between torchrun's agent (or srun) and each rank, so that a notice reaches the
rank alone and not its data loaders, a failure is recorded before any peer is ended, and no rank
outlives its launcher. It does not import torch.
"""

import argparse
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import variables as names
from .control import GuardLink
from .devices import cpus, shared_core_warning, threads_per_rank
from .early import holding
from .environment import Placement, detect
from .errors import REFUSED, LaunchError
from .failure import Failure, exit_code, last_traceback, reason
from .processes import RankProcess, block_signals, start_rank, watch_signals
from .rank_log import RankLog, log_name
from .records import record_locally, record_notice

_END_GRACE = 10.0
_POLL = 0.2


@dataclass
class _Ending:
    """Why and when a rank is killed unless it ends by itself."""

    deadline: float | None = None
    """When it is killed."""
    cause: str = ""
    """What is reported if it had to be killed; empty: its own end is reported."""
    code: int = 0
    terminate_at: float | None = None
    """When it gets TERM, where a peer has failed."""


class Guard:
    """The life of one rank, driven by signals, by the launcher and by the rank's own end."""

    def __init__(self, options: argparse.Namespace, place: Placement) -> None:
        self._options = options
        self._place = place
        self._notices = [
            signal.Signals[f"SIG{name}"] for name in options.notice_signals.split(",") if name
        ]
        self._events: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self._pending: list[signal.Signals] = []
        self._ending = _Ending()
        self._link = GuardLink(options.control, self._events) if options.control else None
        self._parent = os.getppid()
        self._peer_failed = False

    def run(self) -> int:
        """Run the rank to its end; returns its exit code."""
        environ = self._environment()
        log = self._open_log()
        # only Python can hold notices back without its children inheriting that
        held = () if self._options.program else self._notices
        if held:
            environ = holding(environ, held)
        rank = start_rank(self._options.command, environ, held, log)
        watch_signals(self._events)
        rank.watch(self._events)
        if self._link:
            self._link.start(self._place.local_rank)
        while True:
            try:
                kind, value = self._events.get(timeout=_POLL)
            except queue.Empty:
                kind, value = "tick", None
            if kind == "exited":
                return self._finish(rank, log, int(str(value)))
            if kind == "signal":
                self._signalled(rank, *value)  # type: ignore[misc]
            elif kind == "notice":
                self._notice(rank, signal.Signals[f"SIG{value}"])
            elif kind == "end":
                self._end(float(str(value)))
            elif kind == "orphaned":
                self._ending = _Ending(0.0, "was ended since its launcher died", 137)
            self._deliver(rank)
            self._enforce(rank)

    def _environment(self) -> dict[str, str]:
        environ = dict(os.environ)
        if not self._link:
            shared = environ.get("SLURM_CPUS_PER_TASK")
            ranks = 1 if shared else self._place.local_world_size
            environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(cpus(), ranks)))
            warning = None if shared else shared_core_warning(cpus(), ranks)
            if warning and self._place.local_rank == 0:
                print(f"shardclip-launch: {warning}", file=sys.stderr)
        environ.setdefault(names.NOTICE_SIGNALS, self._options.notice_signals)
        return environ

    def _open_log(self) -> RankLog:
        place, host = self._place, socket.gethostname()
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        elastic = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        attempt = restart if elastic == "0" else f"{restart}.{elastic}"
        directory = Path(self._options.log_dir or os.environ.get(names.RUN_DIR) or ".")
        shown = {"0": place.rank == 0, "all": True, "none": False}[self._options.tee]
        prefix = f"{host}:{place.rank} " if self._options.tee == "all" else ""
        lock = Path(self._options.control).with_name("screen") if self._options.control else None
        return RankLog(
            directory / log_name(host, place.rank, attempt), lock, prefix if shown else None
        )

    def _signalled(self, rank: RankProcess, number: int, sender: int) -> None:
        name = signal.Signals(number).name.removeprefix("SIG")
        if self._link:
            # the agent closes with TERM; the scheduler's own copies come through the launcher
            if sender == self._parent and name == "TERM":
                self._end(0.0)
        elif name == "INT" or number in self._notices:
            if _first_failure_known():
                self._end(0.0)
                return
            record_notice(name)
            self._notice(rank, signal.Signals(number))
        else:
            rank.send(signal.Signals(number))

    def _notice(self, rank: RankProcess, number: signal.Signals) -> None:
        if number not in self._pending:
            self._pending.append(number)
        grace = {signal.SIGTERM: self._options.grace, signal.SIGINT: _END_GRACE}.get(number)
        if grace is not None and self._ending.deadline is None:
            self._ending = _Ending(
                time.monotonic() + grace,
                f"did not stop within {grace:g} s of {number.name}",
                128 + number,
            )

    def _deliver(self, rank: RankProcess) -> None:
        """Hand out what the rank has a handler for; a notice is not to end it."""
        for number in [n for n in self._pending if n not in self._notices or rank.catches(n)]:
            self._pending.remove(number)
            rank.send(number)

    def _end(self, delay: float) -> None:
        """End the rank since the run has failed elsewhere; its own error may come first."""
        self._peer_failed = True
        at = time.monotonic() + delay
        self._ending = _Ending(deadline=at + _END_GRACE, terminate_at=at)

    def _enforce(self, rank: RankProcess) -> None:
        now, ending = time.monotonic(), self._ending
        if ending.terminate_at is not None and now >= ending.terminate_at:
            ending.terminate_at = None
            rank.send(signal.SIGTERM)
        if ending.deadline is not None and now >= ending.deadline:
            rank.kill_group()

    def _finish(self, rank: RankProcess, log: RankLog, returncode: int) -> int:
        rank.drain()
        if returncode == 0:
            return 0
        rank.kill_group()
        if self._peer_failed and returncode < 0:
            # ended by this guard: no failure of its own
            return exit_code(returncode)
        late = self._ending.cause != "" and returncode == -signal.SIGKILL
        failure = Failure(
            host=socket.gethostname(),
            rank=self._place.rank,
            code=self._ending.code if late else exit_code(returncode),
            reason=self._ending.cause if late else reason(returncode),
            traceback=last_traceback(list(log.errors)),
            log=str(log.path),
            attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
        if self._link:
            self._link.report(failure)
        elif record_locally(failure):
            print(f"shardclip-launch: {failure.report()}", file=sys.stderr, flush=True)
        return failure.code


def _first_failure_known() -> bool:
    directory = os.environ.get(names.RUN_DIR)
    return bool(directory) and (Path(str(directory)) / "first-failure").exists()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank as its guard; returns the rank's exit code."""
    # before any thread starts, so that every signal waits for the thread that reads them
    block_signals()
    parser = argparse.ArgumentParser(prog="shardclip.launch.guard", allow_abbrev=False)
    parser.add_argument("--control", help="the launcher's socket; without it srun is the launcher")
    parser.add_argument("--log-dir")
    parser.add_argument("--notice-signals", default="TERM,USR1")
    parser.add_argument("--grace", type=float, default=120.0)
    parser.add_argument("--tee", choices=("0", "all", "none"), default="0")
    parser.add_argument("--program", action="store_true", help="the command is not python's")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    options.command = words if options.program else [sys.executable, "-u", *words]
    try:
        if not words:
            raise LaunchError("no script given: ... -- SCRIPT [ARGS...]")
        return Guard(options, detect(os.environ)).run()
    except LaunchError as error:
        print(f"shardclip-launch: {error}", file=sys.stderr)
        return REFUSED


if __name__ == "__main__":
    raise SystemExit(main())
