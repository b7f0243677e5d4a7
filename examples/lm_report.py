"""What a person sees of a training run: progress, and the table at the end."""

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TextIO

from tqdm import tqdm  # type: ignore[import-untyped]

from shardclip.record.outcome import Outcome
from shardclip.record.run_file import Run

WIDTH = 79  # one column is left free, so that no terminal of 80 wraps


class ProgressBar:
    """A bar where `stream` is a terminal, else a plain line every tenth of the run.

    A bar rewrites its line, which tears a log file; hence the two forms.

    Args:
        title: Name of the run, shown on every line.
        steps: Number of steps of the run.
        done: Those done before, by the training that this one goes on with.
        shown: False on the ranks that stay silent.
        stream: Where to write; None for standard output.
    """

    def __init__(
        self,
        title: str,
        steps: int,
        done: int = 0,
        *,
        shown: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stdout
        self._title, self._steps, self._shown = title, steps, shown
        self._every = max(1, steps // 10)
        self._done = done
        self._bar: tqdm[Any] | None = None
        if shown and self._stream.isatty():
            self._bar = tqdm(
                total=steps,
                initial=done,
                desc=title,
                file=self._stream,
                ncols=WIDTH,
                bar_format="{desc} |{bar}| {remaining}",
            )

    def update(self, step: Outcome, loss: float) -> None:
        """Show one step.

        Args:
            step: What the clipper found and did.
            loss: The mean over all ranks.
        """
        self._done += 1
        text = (
            f"{self._title:<9} {self._done:>4}/{self._steps}  loss {loss:.3f}"
            f"  norm {step.total_norm:<6.3g}  coef {step.clip_coef:.3f}"
        )
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.update()
        elif self._done % self._every == 0 or self._done == self._steps:
            self.note(text)

    def note(self, text: str) -> None:
        """Write a whole line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        elif self._shown:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        if self._bar is not None:
            self._bar.close()


def losses(run: Run) -> list[float]:
    """Return each step's loss, the mean over the ranks, which travelled as their sum."""
    ranks: int = run.meta["ranks"]
    return [step.sums["loss"] / ranks for step in run.steps]


def table(
    runs: Sequence[Run], max_norm: float, validation: dict[str, float], errors: dict[str, float]
) -> str:
    """Compare the runs in one table, a column for each.

    Args:
        runs: What their clippers recorded.
        max_norm: The threshold of the clipped run.
        validation: Run -> loss on text that was not trained on, in nats a byte.
        errors: Run -> how far its norm was from the gathered gradients', at most.
    """
    last = max(1, min(len(run.steps) for run in runs) // 10)
    rows: list[tuple[str, Callable[[Run], str]]] = [
        (
            f"training loss, last {last} steps",
            lambda run: f"{statistics.fmean(losses(run)[-last:]):.3f}",
        ),
        ("validation loss, held-out files", lambda run: f"{validation[run.name]:.3f}"),
        ("  in bits a byte", lambda run: f"{validation[run.name] / math.log(2):.3f}"),
        ("largest norm", lambda run: f"{max(step.total_norm for step in run.steps):.2f}"),
        (
            "largest norm that reached AdamW",
            lambda run: f"{max(step.clipped_norm for step in run.steps):.2f}",
        ),
        (
            f"steps with a norm above {max_norm:g}",
            lambda run: f"{_share(step.total_norm > max_norm for step in run.steps):.0%}",
        ),
        ("steps clipped", lambda run: f"{_share(step.clipped for step in run.steps):.0%}"),
        (
            "norm against the gathered gradients",
            lambda run: f"{errors[run.name]:.0e} off" if run.name in errors else "not checked",
        ),
        ("seconds a step, median", _seconds),
    ]
    lines = [f"{'':<38}" + "".join(f"{run.name:>18}" for run in runs)]
    lines.append("-" * len(lines[0]))
    for label, cell in rows:
        lines.append(f"{label:<38}" + "".join(f"{cell(run):>18}" for run in runs))
    return "\n".join(lines)


def _seconds(run: Run) -> str:
    times = [after.time - before.time for before, after in pairwise(run.steps)]
    return f"{statistics.median(times):.3f}" if times else ""


def _share(flags: Iterable[bool]) -> float:
    return statistics.fmean(map(float, flags))
