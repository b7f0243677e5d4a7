"""The run's store, seen by the launchers: who is there, and which rank failed first."""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from .failure import Failure
from .plan import Plan

_BEAT = 1.0
_PATIENCE = timedelta(seconds=5)


class RunStore:
    """A client of the store that torchrun's agent on host 0 holds.

    All calls to the store are made by one thread, since one that waits for a cut link would
    hold up the rest; what it learns is kept here.
    """

    def __init__(self, plan: Plan, port: int, on_failure: Callable[[Failure], None]) -> None:
        self._plan = plan
        self._port = port
        self._on_failure = on_failure
        self._mutex = threading.Lock()
        self._store: Any = None
        self._answered = time.monotonic()
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._done: set[int] = set()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.first: Failure | None = None
        self.joined = threading.Event()
        self._started = time.monotonic()

    def start(self, patience: float) -> None:
        """Connect, and beat until it is stopped or the process ends."""
        self._thread = threading.Thread(
            target=self._run, args=(patience,), name="store", daemon=True
        )
        self._thread.start()

    def _run(self, patience: float) -> None:
        import torch.distributed as dist  # noqa: PLC0415 - login nodes have no torch

        try:
            # on the head this is the agent's own server, kept until the last host has left
            raw = dist.TCPStore(  # type: ignore[attr-defined]
                self._plan.master_addr, self._port, None, self._plan.node_rank == 0,
                timedelta(seconds=patience), wait_for_workers=False, multi_tenant=True,
            )  # fmt: skip
        except Exception:
            # the agent says why; silent_hosts() names the head
            return
        store = dist.PrefixStore("shardclip-launch", raw)  # type: ignore[attr-defined]
        store.set_timeout(_PATIENCE)
        with self._mutex:
            self._store = store
            self._answered = time.monotonic()
        self.joined.set()
        beat = 0
        while not self._stopped.wait(_BEAT if beat else 0.0):
            # where the store is cut off or gone, silent_hosts() tells since when
            with contextlib.suppress(Exception):
                self._exchange(store, beat)
            beat += 1

    def _exchange(self, store: Any, beat: int) -> None:
        own = self._plan.node_rank
        store.set(f"beat/{own}", str(beat))
        if self.first is None and store.check(["first"]):
            self.first = Failure.loads(store.get("first"))
            self._on_failure(self.first)
        now = time.monotonic()
        self._answered = now
        if own != 0:
            return
        for node in range(1, self._plan.nnodes):
            if store.check([f"done/{node}"]):
                self._done.add(node)
            if store.check([f"beat/{node}"]):
                value = store.get(f"beat/{node}")
                if self._beats.get(node, (b"", 0.0))[0] != value:
                    self._beats[node] = (value, now)

    def record(self, failure: Failure) -> Failure:
        """Record a failure unless another was first; returns the first, or this without a store."""
        store = self._store
        if store is None or self._plan.nnodes == 1 or self._cut_off():
            return failure
        answer: list[Failure] = []

        def ask() -> None:
            answer.append(Failure.loads(store.compare_set("first", "", failure.dumps())))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_PATIENCE.total_seconds())
        if answer:
            self.first = answer[0]
        return answer[0] if answer else failure

    def silent_hosts(self, seconds: float) -> dict[str, float]:
        """Return the hosts without a sign of life for so long, and for how long."""
        now = time.monotonic()
        if self._plan.nnodes == 1:
            return {}
        if self._plan.node_rank != 0:
            silence = now - self._answered
            return {self._plan.host_name(0): silence} if silence > seconds else {}
        silent = {}
        for node in range(1, self._plan.nnodes):
            since = now - self._beats.get(node, (b"", self._started))[1]
            if node not in self._done and since > seconds:
                silent[self._plan.host_name(node)] = since
        return silent

    def _cut_off(self) -> bool:
        """Tell whether the store has stopped answering: to ask it would only take time."""
        return self._plan.node_rank != 0 and bool(self.silent_hosts(_PATIENCE.total_seconds()))

    def missing_hosts(self) -> list[str]:
        """Return the hosts that never joined."""
        plan = self._plan
        if plan.node_rank != 0:
            return [] if self.joined.is_set() else [plan.host_name(0)]
        return [plan.host_name(node) for node in range(1, plan.nnodes) if node not in self._beats]

    def stop(self) -> None:
        """Beat no more, and let a call that is under way end.

        One that came back while Python ends would abort the process, whatever its exit code.
        """
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE.total_seconds())

    def leave(self, patience: float) -> None:
        """Say that this host is done; on host 0 wait for the others, which still need the store."""
        store, plan = self._store, self._plan
        if store is None or plan.nnodes == 1 or self._cut_off():
            return

        def say() -> None:
            store.set(f"done/{plan.node_rank}", "1")

        thread = threading.Thread(target=say, daemon=True)
        thread.start()
        thread.join(2.0)
        end = time.monotonic() + patience
        while plan.node_rank == 0 and time.monotonic() < end:
            silent = len(self.silent_hosts(3 * _BEAT))
            if len(self._done) + silent >= plan.nnodes - 1:
                return
            time.sleep(0.1)
