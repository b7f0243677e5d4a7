"""`shardclip-launch run`: one torchrun agent in this process, and what torchrun leaves out."""

import logging
import os
import queue
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from . import variables as names
from .control import ControlServer
from .environment import detect_hosts
from .errors import HOST_LOST, OK, HostLostError
from .failure import Failure, exit_code, reason
from .options import RunOptions
from .plan import Plan, make_plan, torchrun_arguments
from .processes import block_signals, spread, watch_signals
from .records import record_exit_code, record_notice
from .rendezvous import settle_port
from .run_store import RunStore

_FOLLOW_UP = 3.0
"""Seconds that the other ranks get to fail by themselves, so that their logs say how."""
_SILENT = 5.0
"""Seconds of silence after which a host is named beside another failure."""


def run(options: RunOptions, environ: Mapping[str, str]) -> int:
    """Start this host's ranks and see them to their end; returns the run's exit code.

    Raises:
        LaunchError: refused before anything was started.
        HostLostError: a host did not join.
    """
    hosts = detect_hosts(environ)
    plan = make_plan(options, hosts, environ, f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    if options.dry_run:
        arguments = torchrun_arguments(options, plan, plan.master_port or 0, "SOCKET")
        print(_wrapped(["torchrun", *arguments]))
        return OK
    for warning in plan.warnings:
        _say(warning)
    if not hosts.in_step:
        return spread(plan.nnodes)
    # before torch starts threads, so that no signal ends the agent
    block_signals()
    port = settle_port(plan, options.join_timeout)
    os.environ.update(plan.environ)
    _forget_earlier_runs(plan)
    return _Launcher(options, plan, port).run()


def _forget_earlier_runs(plan: Plan) -> None:
    """Remove what an earlier run in the same directory left for its launchers and ranks."""
    old = ["first-failure", "exit-code"] if plan.node_rank == 0 else []
    # a batch script names these two files itself: it has removed the old ones, and may have
    # had notice since
    old += [n for v, n in ((names.STOP_FILE, "stop"), (names.MARKER, "stopped"))
            if v in plan.environ]  # fmt: skip
    for name in old:
        (plan.run_dir / name).unlink(missing_ok=True)


def _wrapped(words: list[str], width: int = 78) -> str:
    """Write a command for a shell, on as many lines as it takes."""
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n  ".join(lines)


def _quieten() -> None:
    """Keep torch from logging each follow-up error; what matters is printed at the end."""
    if "LOGLEVEL" in os.environ:
        return
    for name in ("torch.distributed.elastic", *logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _unreported(error: Exception | None) -> Failure | None:
    """Return the failure that the agent saw of a rank whose guard could not report."""
    ask = getattr(error, "get_first_failure", None)
    if ask is None:
        return None
    rank, seen = ask()
    how = f"failed: its guard {reason(seen.exitcode)}"
    return Failure(socket.gethostname(), rank, exit_code(seen.exitcode), how)


def _say(text: str) -> None:
    print(f"shardclip-launch: {text}", file=sys.stderr, flush=True)


class _Launcher:
    """A host's part of a run: the agent, the guards' line, the run's store and the signals."""

    def __init__(self, options: RunOptions, plan: Plan, port: int) -> None:
        self._options, self._plan, self._port = options, plan, port
        self._events: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._local_first: Failure | None = None
        self._lost: dict[str, float] = {}
        self._ended_by: int | None = None
        self._interrupts = 0
        self._over = threading.Event()
        self._private = Path(tempfile.mkdtemp(prefix="shardclip-"))
        self._control = ControlServer(self._private / "control", self._failed_here)
        self._store = RunStore(plan, port, self._failed_elsewhere)

    def run(self) -> int:
        """Run the agent; returns the run's exit code."""
        watch_signals(self._events)
        threading.Thread(target=self._serve_signals, name="notices", daemon=True).start()
        if self._plan.nnodes > 1:
            threading.Thread(target=self._watch_hosts, name="hosts", daemon=True).start()
            threading.Thread(target=self._watch_agent, name="agent", daemon=True).start()
        try:
            self._run_agent()
            self._store.leave(5.0)
            return OK
        except Exception as error:
            self._over.set()
            return self._failed(error)
        finally:
            self._over.set()
            self._store.stop()
            shutil.rmtree(self._private, ignore_errors=True)

    def _run_agent(self) -> None:
        quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
        if quiet:
            os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        from torch.distributed.run import parse_args  # noqa: PLC0415 - login nodes have no torch
        from torch.distributed.run import run as torchrun  # noqa: PLC0415

        if quiet:
            # read once, while torch loads; the ranks keep their own
            del os.environ["TORCH_CPP_LOG_LEVEL"]
        _quieten()
        self._store.start(self._options.join_timeout)
        control = str(self._private / "control")
        arguments = torchrun_arguments(self._options, self._plan, self._port, control)
        torchrun(parse_args(arguments))  # type: ignore[no-untyped-call]

    def _failed(self, error: Exception | None) -> int:
        """Say last what failed first, and return its code."""
        first = self._store.first or self._local_first or _unreported(error)
        silent = self._lost or self._store.silent_hosts(_SILENT)
        if first is None:
            if not self._lost:
                self._raise_start_failure(error)
            code = HOST_LOST
        else:
            code = first.code
        if self._lost and (first is None or self._ended_by == HOST_LOST):
            code = HOST_LOST
        # the others' last words come before ours
        self._store.leave(5.0)
        if first is not None:
            own = first.host == socket.gethostname()
            if own or self._plan.node_rank == 0:
                _say(first.report())
            else:
                _say(f"rank {first.rank} on {first.host} failed first and {first.reason}")
        for host, seconds in silent.items():
            _say(f"host {host} has not answered for {seconds:.0f} s")
        if self._plan.node_rank == 0 or first is self._local_first:
            record_exit_code(code)
        return code

    def _raise_start_failure(self, error: Exception | None) -> None:
        missing = self._store.missing_hosts()
        if missing and self._plan.nnodes > 1:
            raise HostLostError(
                f"host {', '.join(missing)} did not join within {self._options.join_timeout:g} s: "
                f"not started, or {self._plan.master_addr} port {self._port} is not reachable "
                f"from there ({type(error).__name__}: {str(error).splitlines()[0]})"
            ) from error
        if error is not None:
            raise error

    # what the guards, the store and the watch say

    def _failed_here(self, failure: Failure) -> None:
        with self._mutex:
            if self._local_first is None or failure.attempt > self._local_first.attempt:
                self._local_first = failure
        if self._options.max_restarts == 0 and self._ended_by is None:
            self._store.record(failure)
            self._control.tell({"end": _FOLLOW_UP}, keep=True)

    def _failed_elsewhere(self, failure: Failure) -> None:
        if failure is not self._local_first:
            self._control.tell({"end": _FOLLOW_UP}, keep=True)

    def _watch_hosts(self) -> None:
        while not self._over.wait(1.0):
            # before all have joined the agents' own time-out counts
            if self._control.connected == 0:
                continue
            lost = self._store.silent_hosts(self._options.host_timeout)
            if lost and not self._lost:
                self._lost = lost
                self._ended_by = HOST_LOST
                for host, seconds in lost.items():
                    _say(f"host {host} has not answered for {seconds:.0f} s; ending the run")
                self._control.tell({"end": 0.0}, keep=True)

    def _watch_agent(self) -> None:
        """Finish in the agent's place where it waits for minutes for a store that is cut off."""
        idle = 0
        while idle < 3:
            if self._over.wait(0.5):
                return
            failed = self._lost or (self._local_first and self._options.max_restarts == 0)
            idle = idle + 1 if failed and self._control.connected == 0 else 0
        if self._store.silent_hosts(_SILENT):
            self._leave(self._failed(None))

    def _leave(self, code: int) -> NoReturn:
        # the guards see the end of their line and end their ranks
        shutil.rmtree(self._private, ignore_errors=True)
        sys.stdout.flush()
        os._exit(code)

    # signals

    def _serve_signals(self) -> None:
        while True:
            _, value = self._events.get()
            number = signal.Signals(value[0])  # type: ignore[index]
            name = number.name.removeprefix("SIG")
            if name in self._options.notice_signals:
                record_notice(name)
            if name in {"INT", "QUIT"}:
                self._interrupts += 1
            if name == "QUIT" or self._interrupts > 1:
                self._give_up(number)
            self._control.tell({"notice": name}, keep=True)
            grace = {"TERM": self._options.grace, "INT": 10.0, "HUP": 10.0}.get(name)
            if grace is not None:
                # the guards keep the time; this ends a run that hangs elsewhere
                timer = threading.Timer(grace + 15.0, self._give_up, (number,))
                timer.daemon = True
                timer.start()

    def _give_up(self, number: signal.Signals) -> None:
        _say(f"ended by {number.name}")
        record_exit_code(128 + number)
        self._leave(128 + number)
