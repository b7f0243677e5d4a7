"""What a person sees of a training run: progress, the metrics file and the table at the end."""

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm  # type: ignore[import-untyped]

Record = dict[str, Any]
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

    def update(self, record: Record) -> None:
        """Show one step's record."""
        self._done += 1
        text = (
            f"{self._title:<9} {self._done:>4}/{self._steps}  loss {record['loss']:.3f}"
            f"  norm {record['total_norm']:<6.3g}  coef {record['clip_coef']:.3f}"
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


def write_metrics(path: Path, records: Sequence[Record]) -> None:
    """Write one JSON object a line; a number that is not finite becomes null, as JSON has none."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            finite = {key: _finite_or_none(value) for key, value in record.items()}
            file.write(json.dumps(finite, allow_nan=False) + "\n")


def read_metrics(path: Path) -> list[Record]:
    """Read what `write_metrics` wrote; a null becomes NaN again."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        {key: math.nan if value is None else value for key, value in json.loads(line).items()}
        for line in lines
    ]


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def split_runs(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Sort records by their run, in the order in which the runs appear."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record["run"], []).append(record)
    return runs


def table(records: Sequence[Record], max_norm: float, validation: dict[str, float]) -> str:
    """Compare the runs in one table, a column for each.

    Args:
        records: Every step of every run.
        max_norm: The threshold of the clipped run.
        validation: Run -> loss on text that was not trained on, in nats a byte.
    """
    runs = split_runs(records)
    last = max(1, min(len(run) for run in runs.values()) // 10)
    rows: list[tuple[str, Callable[[str, list[Record]], str]]] = [
        (
            f"training loss, last {last} steps",
            lambda _, run: f"{statistics.fmean(step['loss'] for step in run[-last:]):.3f}",
        ),
        ("validation loss, held-out files", lambda name, _: f"{validation[name]:.3f}"),
        ("  in bits a byte", lambda name, _: f"{validation[name] / math.log(2):.3f}"),
        ("largest norm", lambda _, run: f"{max(step['total_norm'] for step in run):.2f}"),
        (
            "largest norm that reached AdamW",
            lambda _, run: f"{max(step['clipped_norm'] for step in run):.2f}",
        ),
        (
            f"steps with a norm above {max_norm:g}",
            lambda _, run: f"{_share(step['total_norm'] > max_norm for step in run):.0%}",
        ),
        ("steps clipped", lambda _, run: f"{_share(step['clipped'] for step in run):.0%}"),
        (
            "norm against the gathered gradients",
            lambda _, run: f"{max(step.get('norm_error', 0.0) for step in run):.0e} off",
        ),
        (
            "seconds a step, median",
            lambda _, run: f"{statistics.median(step['seconds'] for step in run):.3f}",
        ),
    ]
    lines = [f"{'':<38}" + "".join(f"{name:>18}" for name in runs)]
    lines.append("-" * len(lines[0]))
    for label, cell in rows:
        lines.append(f"{label:<38}" + "".join(f"{cell(*run):>18}" for run in runs.items()))
    return "\n".join(lines)


def _share(flags: Any) -> float:
    return statistics.fmean(float(flag) for flag in flags)
