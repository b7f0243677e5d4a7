"""The parent's side of the pool: starts ranks, sends functions by name, reports failures."""

import contextlib
import functools
import os
import pickle
import shutil
import signal
import tempfile
import time
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import pytest

from tests.waiting import wait_for

from .nursery import Nursery

START_LIMIT_S = 200.0  # each below pytest's own limit, which knows less of what hangs
CALL_LIMIT_S = 200.0
GRACE_S = 2.0  # after the first failure the other ranks get this long to report theirs
STACK_S = 5.0  # a rank's faulthandler writes at once, if it can at all


class RankError(AssertionError):
    """A rank raised, died or did not come back; the message holds that rank's own traceback."""


class Rank:
    """One process, its pipe, and a file with what it wrote to stdout and stderr."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank = rank
        self.log = folder / f"rank{rank}.log"
        self.pipe, theirs = Pipe()
        store = str(folder / "store")
        self.pid = Nursery.get().fork(theirs, (rank, world_size, store, str(self.log)))

    def receive(self) -> tuple[str, object]:
        """The rank's next message; that it died, if its pipe is closed."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            code = Nursery.get().reap(self.pid)
            self.pid = None
            return "died", f"exit code {code}\n{self.log_tail()}"

    def where_it_hangs(self) -> str:
        """The Python stack of a rank that does not come back, written by its faulthandler."""
        before = self.log.stat().st_size
        os.kill(self.pid, signal.SIGUSR1)
        with contextlib.suppress(AssertionError):
            wait_for(lambda: b"in <module>" in self.log.read_bytes()[before:], seconds=STACK_S)
        return self.log_tail()

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
            Nursery.get().reap(self.pid)
        self.pipe.close()


class RankPool:
    """`world_size` processes in one Gloo group, meeting through a file (no port to collide)."""

    def __init__(self, world_size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks"))
        self.ranks = [Rank(rank, world_size, self.folder) for rank in range(world_size)]
        self.collect("start", START_LIMIT_S)

    def call(self, function, args: tuple, kwargs: dict, limit_s: float) -> list:
        __tracebackhide__ = True
        name = function.__qualname__
        request = pickle.dumps((function.__module__, name, args, kwargs))
        for rank in self.ranks:
            rank.pipe.send_bytes(request)
        return self.collect(name, limit_s)

    def collect(self, name: str, limit_s: float) -> list:
        """Every rank's result, or a RankError after which this pool is closed."""
        __tracebackhide__ = True
        answers: dict[int, tuple[str, object]] = {}
        deadline = time.monotonic() + limit_s
        waiting: dict[Connection, Rank] = {rank.pipe: rank for rank in self.ranks}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                answers[rank.rank] = rank.receive()
                if answers[rank.rank][0] != "returned":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not waiting and all(kind == "returned" for kind, _ in answers.values()):
            return [answers[rank.rank][1] for rank in self.ranks]
        for rank in waiting.values():
            answers[rank.rank] = ("did not come back", rank.where_it_hangs())
        self.close()
        raise RankError(_report(name, answers))

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.ranks = []
        shutil.rmtree(self.folder, ignore_errors=True)


def _report(name: str, answers: dict[int, tuple[str, object]]) -> str:
    lines = [f"{name} failed"]
    seen: dict[str, int] = {}
    for rank, (kind, what) in sorted(answers.items()):
        if kind == "returned":
            lines.append(f"--- rank {rank}: returned")
        elif (text := str(what)) in seen:
            lines.append(f"--- rank {rank}: {kind}, as rank {seen[text]}")
        else:
            seen[text] = rank
            lines.append(f"--- rank {rank}: {kind}\n{text}")
    return "\n".join(lines)


_POOLS: dict[int, RankPool] = {}


def run_on_ranks(
    world_size: int,
    function,
    *args: object,
    limit_s: float = CALL_LIMIT_S,
    fresh: bool = False,
    **kwargs: object,
) -> list:
    """Run a module-level function on every rank; the results, by rank.

    The ranks are started on first use and kept for the session; a failure ends them, and the next
    call starts new ones. `fresh` starts new ones first, for what happens once per process.
    """
    __tracebackhide__ = True
    if fresh and world_size in _POOLS:
        _POOLS.pop(world_size).close()
    if world_size not in _POOLS:
        _POOLS[world_size] = RankPool(world_size)
    try:
        return _POOLS[world_size].call(function, args, kwargs, limit_s)
    except BaseException:  # also a Ctrl-C or pytest's timeout: ranks in mid-call are of no use
        _POOLS.pop(world_size).close()
        raise


def close_pools() -> None:
    while _POOLS:
        _POOLS.popitem()[1].close()
    Nursery.close()


def on_ranks(world_size: int, *, fresh: bool = False, limit_s: float = CALL_LIMIT_S):
    """Make a test's body run on every rank; it takes its parameters and no fixtures."""

    def decorate(body):
        @functools.wraps(body)
        def send(**kwargs):
            __tracebackhide__ = True
            run_on_ranks(world_size, body, fresh=fresh, limit_s=limit_s, **kwargs)

        send.body = body
        return pytest.mark.processes(send)

    return decorate
