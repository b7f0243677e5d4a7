"""A notice to stop, for the training loop: seen by one rank, agreed on by all."""

import atexit
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from . import variables as names
from .environment import detect
from .errors import LaunchError
from .records import write_whole

_DEFAULT = "TERM,USR1"


class StopSignal:
    """Notice that the run is to stop, by a signal or by a file, and leave word that it did.

    A notice reaches ranks at different times, and not all of them. So the loop sums `flag` over
    the ranks, best in an all-reduce that it makes anyway, and all stop at the same step:

        stop = StopSignal()
        for step in ...:
            clipped = clipper.clip_(also={"stop": stop.flag})   # no further collective
            optimizer.step()
            if clipped.sums["stop"] > 0:
                save(step)
                stop.mark(step)
                break

    Then every rank exits 0. Slurm may deliver a signal more than once; one is counted.

    Children of the rank (data loaders) get its notices too where the scheduler signals every
    process: they start with them blocked, and with TERM as it is by default, so that
    `Process.terminate` ends them.

    Args:
        signals: what counts as a notice, as names (`"USR1"`) or numbers; None: those that the
            launcher passes on, else TERM and USR1.
        stop_file: a file whose existence is a notice too; it catches one that came before this
            object was made. None: the one that the launcher names, if any.
        marker: the file that `mark` writes; None: the one that the launcher names, if any.

    Raises:
        LaunchError: an unknown signal, or not called in the main thread.
    """

    def __init__(
        self,
        signals: Sequence[str | int] | None = None,
        stop_file: str | os.PathLike[str] | None = None,
        marker: str | os.PathLike[str] | None = None,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise LaunchError("StopSignal: make it in the main thread, the only one to get signals")
        chosen = signals if signals is not None else _launcher_signals()
        self._signals = tuple(_signal(one) for one in chosen)
        self._stop_file = _path(stop_file, names.STOP_FILE)
        self._marker = _path(marker, names.MARKER)
        self._place = detect(os.environ)
        self._noticed = False
        self._previous: dict[signal.Signals, Any] = {}
        self._closed = threading.Event()
        self._install()

    def _install(self) -> None:
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._notice)
        shielded = [s for s in self._signals if s not in {signal.SIGTERM, signal.SIGINT}]
        if shielded:
            ready = threading.Event()
            threading.Thread(
                target=self._receive, args=(shielded, ready), name="stop-signal", daemon=True
            ).start()
            ready.wait()
            # children inherit this thread's mask, and a blocked signal ends none of them
            signal.pthread_sigmask(signal.SIG_BLOCK, shielded)
        os.register_at_fork(after_in_child=self._in_child)
        atexit.register(self._at_exit)

    def _receive(self, shielded: list[signal.Signals], ready: threading.Event) -> None:
        """Be the thread to which the shielded signals are delivered."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, shielded)
        ready.set()
        self._closed.wait()

    def _at_exit(self) -> None:
        # a second notice may come while Python, ending, gives signals their default: death
        for number in self._signals if not self._closed.is_set() else ():
            signal.signal(number, signal.SIG_IGN)

    def _in_child(self) -> None:
        if signal.SIGTERM in self._previous and not self._closed.is_set():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._noticed = True

    @property
    def flag(self) -> int:
        """1 once this rank has had notice, else 0: to be summed over the ranks."""
        # one rank a host looks at the file, which may lie on a slow, shared disk
        if not self._noticed and self._stop_file is not None and self._place.local_rank == 0:
            self._noticed = self._stop_file.exists()
        return int(self._noticed)

    def agree(self, group: Any = None) -> bool:
        """Tell whether any rank has had notice, for a loop with no all-reduce to put it in.

        Args:
            group: the ranks that ask; None: all.

        Communication:
            1 all-reduce of one number, and a host sync. Without a process group none.
        """
        import torch  # noqa: PLC0415 - importing this file must not import torch
        import torch.distributed as dist  # noqa: PLC0415

        if not dist.is_initialized():
            return bool(self.flag)
        device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
        flags = torch.tensor([self.flag], device=device)
        dist.all_reduce(flags, group=group)
        return bool(flags.item() > 0)

    def mark(self, step: int) -> None:
        """Leave word, once the checkpoint is saved, that the run stopped at this step.

        Rank 0 writes the marker; the batch script requeues a job on nothing else. Without a
        marker file, neither given nor named by the launcher, this does nothing.
        """
        if self._marker is not None and self._place.rank == 0:
            write_whole(self._marker, f"{step}\n")

    def close(self) -> None:
        """Put the former handlers back."""
        if self._closed.is_set():
            return
        self._closed.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)

    def __enter__(self) -> "StopSignal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _launcher_signals() -> list[str]:
    return [name for name in os.environ.get(names.NOTICE_SIGNALS, _DEFAULT).split(",") if name]


def _signal(one: str | int) -> signal.Signals:
    try:
        if isinstance(one, str):
            return signal.Signals[f"SIG{one.upper().removeprefix('SIG')}"]
        return signal.Signals(one)
    except (KeyError, ValueError):
        raise LaunchError(f"StopSignal: {one!r} is no signal; use names such as 'USR1'") from None


def _path(given: str | os.PathLike[str] | None, variable: str) -> Path | None:
    text = given if given is not None else os.environ.get(variable)
    return Path(text) if text else None
