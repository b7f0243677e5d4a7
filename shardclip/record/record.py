"""A running record of a clipper's steps, without a host sync."""

from __future__ import annotations

import logging
import statistics
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Protocol, overload

from torch import Tensor

from shardclip.compat import HostCopy, is_capturing

from .outcome import Heading, Outcome

_log = logging.getLogger("shardclip")


class Step(Protocol):
    """What is recorded: a ``ClipResult``, of which only this is needed."""

    heading: Heading

    def packed(self) -> Tensor:
        """Return the numbers that ``heading`` reads, a new tensor on the device."""
        ...


class Sink(Protocol):
    """What steps are sent to; ``shardclip.logging`` has several."""

    def write(self, result: Outcome, step: int | None = None) -> object:
        """Take one step."""
        ...

    def close(self) -> None:
        """Take no more."""
        ...


class Record:
    """The last steps of a ``GradClipper``, and counts since the first one.

    ``clipper.record`` is one; every ``clip_()`` adds to it. A step's numbers are packed in one
    small tensor and copied to the host while training goes on, so adding never waits for the
    device. Reading does, for the steps that are read::

        record[-2]  # the step before the last: on the host by now, as a rule
        record.share_clipped(window=100)
        record.send_to(JsonLines("run.jsonl"))  # every step, as soon as it has arrived

    What is read is the same on every rank. Neither gradients nor parameters are kept.

    Args:
        keep: How many steps are kept. Older ones stay in the counts.

    Raises:
        ValueError: ``keep`` is not at least 2.

    Communication:
        None. Adding costs no host sync; reading one for the newest step that is read.
    """

    def __init__(self, keep: int = 1000) -> None:
        if keep < 2:
            raise ValueError(f"keep must be at least 2 steps, got {keep}")
        self._ledger = _Ledger(keep)
        # At exit what has arrived is still sent. Waiting is wrong there: the device may hang.
        weakref.finalize(self, self._ledger.settle, wait=False)

    def add(self, result: Step) -> None:
        """Take a step's numbers, on the device as they are; no host sync.

        Nothing is taken while a CUDA graph is captured, since its replays do not call this.

        Args:
            result: What ``clip_()`` returned.
        """
        if not is_capturing():
            self._ledger.add(_Arriving(result))

    def send_to(self, *sinks: Sink) -> None:
        """Send every step from now on to these, in order, once it has arrived on the host.

        On CPU that is at once; on CUDA with a later step, so that nothing waits. The end of the
        program and ``flush()`` send the rest. May be called on one rank alone: nothing
        communicates. A sink that raises is logged and dropped, since an error on one rank would
        leave the others waiting in their next all-reduce.

        Args:
            sinks: Objects with ``write(outcome)`` and ``close()``.
        """
        self._ledger.settle(wait=True)  # what came before is not theirs
        self._ledger.sinks += sinks

    def flush(self) -> None:
        """Wait for all steps and send them; one host sync."""
        self._ledger.settle(wait=True)

    def close(self) -> None:
        """Wait for all steps, send them, and close what they were sent to; one host sync."""
        self.flush()
        while self._ledger.sinks:
            self._ledger.sinks.pop().close()

    def __len__(self) -> int:
        return len(self._ledger.kept)

    def __iter__(self) -> Iterator[Outcome]:
        return (step.outcome() for step in list(self._ledger.kept))

    @overload
    def __getitem__(self, index: int) -> Outcome: ...
    @overload
    def __getitem__(self, index: slice) -> list[Outcome]: ...
    def __getitem__(self, index: int | slice) -> Outcome | list[Outcome]:
        """Return kept steps, the oldest first; waits for those alone."""
        kept = self._ledger.kept
        if isinstance(index, slice):
            return [kept[place].outcome() for place in range(*index.indices(len(kept)))]
        return kept[index].outcome()

    @property
    def steps(self) -> int:
        """How many steps were added since the beginning; no host sync."""
        return self._ledger.added

    @property
    def clipped(self) -> int:
        """How many of them were scaled down."""
        return self._ledger.count("clipped")

    @property
    def skipped(self) -> int:
        """How many were skipped."""
        return self._ledger.count("skipped")

    @property
    def nonfinite(self) -> int:
        """How many had a norm that is NaN or infinite."""
        return self._ledger.count("nonfinite")

    def share_clipped(self, window: int = 100) -> float:
        """Return the share of clipped steps among the last ``window``, 0 to 1; NaN without steps.

        Args:
            window: How many steps; of those kept.
        """
        last = self._last(window)
        return sum(step.clipped for step in last) / len(last) if last else float("nan")

    def summary(self, window: int = 100) -> dict[str, float]:
        """Return plain numbers for a logger.

        Args:
            window: Over how many of the last steps the share and the medians go.

        Returns:
            The counts, the share of clipped steps, and of the window the median and the largest
            norm before clipping and the median after.
        """
        last = [step for step in self._last(window) if step.finite]
        out = {
            "steps": float(self.steps),
            "clipped": float(self.clipped),
            "skipped": float(self.skipped),
            "nonfinite": float(self.nonfinite),
            "share_clipped": self.share_clipped(window),
        }
        if last:
            out["median_norm"] = statistics.median(step.total_norm for step in last)
            out["largest_norm"] = max(step.total_norm for step in last)
            out["median_clipped_norm"] = statistics.median(step.clipped_norm for step in last)
        return out

    def _last(self, window: int) -> list[Outcome]:
        if window < 1:
            raise ValueError(f"window must be at least 1 step, got {window}")
        return self[-window:]

    def __repr__(self) -> str:
        return f"Record({self.steps} steps, {len(self)} kept)"


class _Arriving:
    """One step's numbers on their way to the host."""

    __slots__ = ("_copy", "_heading")

    def __init__(self, result: Step) -> None:
        self._heading = result.heading
        self._copy = HostCopy(result.packed())

    def has_arrived(self) -> bool:
        return self._copy.has_arrived()

    def outcome(self) -> Outcome:
        """Wait, and read."""
        return self._heading.outcome(self._copy.read().tolist())


class _Ledger:
    """The kept steps, and which of them are counted and sent."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.kept: deque[_Arriving] = deque()
        self.sinks: list[Sink] = []
        self.added = 0
        self._settled = 0  # how many steps are counted and sent
        self._counts = dict.fromkeys(("clipped", "skipped", "nonfinite"), 0)

    def add(self, step: _Arriving) -> None:
        self.kept.append(step)
        self.added += 1
        if self.sinks:
            self.settle(wait=False)
        if len(self.kept) > self.keep:
            if self._settled == self.added - len(self.kept):
                self._settle(self.kept[0])  # so old that it has arrived long ago
            self.kept.popleft()

    def count(self, what: str) -> int:
        self.settle(wait=True)
        return self._counts[what]

    def settle(self, *, wait: bool) -> None:
        """Count and send the steps, in order, that have arrived; all of them if that may wait."""
        first = self._settled - (self.added - len(self.kept))
        for step in list(islice(self.kept, first, None)):
            if not wait and not step.has_arrived():
                return
            self._settle(step)

    def _settle(self, step: _Arriving) -> None:
        outcome = step.outcome()
        self._settled += 1
        self._counts["clipped"] += outcome.clipped
        self._counts["skipped"] += outcome.skipped
        self._counts["nonfinite"] += not outcome.finite
        self.sinks[:] = [sink for sink in self.sinks if _sent(outcome, sink)]


def _sent(outcome: Outcome, sink: Sink) -> bool:
    try:
        sink.write(outcome)
    except Exception:
        _log.exception("step %d: %r failed; it gets no more", outcome.step, sink)
        return False
    return True
