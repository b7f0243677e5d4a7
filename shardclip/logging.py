"""Where a clipper's steps can be sent: TensorBoard, Weights & Biases, MLflow, logging, JSON lines.

Each takes ``write(result)`` with a ``ClipResult``, at the cost of its host sync; or, without one,
every step from the clipper's record as soon as it has arrived on the host::

    if rank == 0:  # the caller's choice: nothing here communicates
        clipper.record.send_to(JsonLines("run.jsonl"), TensorBoard("runs/1"))
    ...
    clipper.record.close()

An optional package is imported when its class is used, never before.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import run_file
from .outcome import Outcome

if TYPE_CHECKING:
    from .result import ClipResult

__all__ = ["JsonLines", "MLflow", "Sink", "StandardLogging", "TensorBoard", "WeightsAndBiases"]


class Sink:
    """What all of them share.

    Args:
        every: Write one step of so many.
        norms_every: Write the norms by parameter or module in one step of so many; 0: never. They
            are there if the clipper was built with ``norms=``.

    Raises:
        ValueError: A number of steps is not positive.
    """

    def __init__(self, *, every: int = 1, norms_every: int = 0) -> None:
        if every < 1 or norms_every < 0:
            raise ValueError(
                f"every must be at least 1 step and norms_every at least 0, got {every} and "
                f"{norms_every}"
            )
        self.every, self.norms_every = every, norms_every
        self._written = 0

    def write(self, result: ClipResult | Outcome, step: int | None = None) -> None:
        """Write one step, if it is one that is written.

        Args:
            result: What ``clip_()`` returned (reading it is one host sync on CUDA), or what
                ``clipper.record`` keeps.
            step: Its number; None: the clipper's own.
        """
        outcome = result if isinstance(result, Outcome) else result.outcome
        self._written += 1
        number = step if step is not None else outcome.step or self._written
        if number % self.every == 0 or not outcome.finite:
            norms = self.norms_every > 0 and number % self.norms_every == 0
            self._put(replace(outcome, step=number), norms=norms and bool(outcome.norms))

    def _put(self, step: Outcome, *, norms: bool) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Finish; what was opened by the caller stays open."""


class TensorBoard(Sink):
    """Write scalars, and the norms by name as histograms, with a ``SummaryWriter``.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``, or the folder for a new one.
        prefix: Of the tags.
        every: As in ``Sink``.
        norms_every: As in ``Sink``; the histogram is the tag ``{prefix}/norms``.

    Raises:
        ImportError: tensorboard is not installed.
        ValueError: As in ``Sink``.
    """

    def __init__(
        self, writer: Any, *, prefix: str = "clip", every: int = 1, norms_every: int = 0
    ) -> None:
        super().__init__(every=every, norms_every=norms_every)
        self._own = isinstance(writer, (str, os.PathLike))
        if self._own:
            tensorboard = _optional("torch.utils.tensorboard", "tensorboard", "tensorboard")
            writer = tensorboard.SummaryWriter(os.fspath(writer))
        self._writer, self._prefix = writer, prefix

    def _put(self, step: Outcome, *, norms: bool) -> None:
        for tag, value in scalars(step, self._prefix).items():
            self._writer.add_scalar(tag, value, step.step, walltime=step.time or None)
        values = _finite_norms(step) if norms else []
        if values:
            numpy = importlib.import_module("numpy")  # torch's SummaryWriter needs it anyway
            tag = f"{self._prefix}/norms"
            self._writer.add_histogram(
                tag, numpy.array(values), step.step, walltime=step.time or None
            )

    def close(self) -> None:
        """Flush; close the writer if it was made here."""
        self._writer.flush()
        if self._own:
            self._writer.close()


class WeightsAndBiases(Sink):
    """Log scalars, and the norms by name as histograms, to a Weights & Biases run.

    The clipper's step is logged as ``{prefix}/step`` and is the axis of all these, since wandb's
    own step only grows, and steps from a record come a little later than what else is logged.

    Args:
        run: What ``wandb.init()`` returned; None: the run that is going on.
        prefix: Of the names.
        every: As in ``Sink``.
        norms_every: As in ``Sink``; the histogram is ``{prefix}/norms``.

    Raises:
        ImportError: wandb is not installed.
        ValueError: No run is going on; or as in ``Sink``.
    """

    def __init__(
        self, run: Any = None, *, prefix: str = "clip", every: int = 1, norms_every: int = 0
    ) -> None:
        super().__init__(every=every, norms_every=norms_every)
        self._wandb = _optional("wandb", "wandb", "wandb")
        self._run = self._wandb.run if run is None else run
        if self._run is None:
            raise ValueError("no Weights & Biases run is going on; call wandb.init() first")
        self._prefix = prefix
        self._run.define_metric(f"{prefix}/step")
        self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def _put(self, step: Outcome, *, norms: bool) -> None:
        logged: dict[str, Any] = dict(scalars(step, self._prefix))
        values = _finite_norms(step) if norms else []
        if values:
            logged[f"{self._prefix}/norms"] = self._wandb.Histogram(values)
        self._run.log(logged | {f"{self._prefix}/step": step.step})


class MLflow(Sink):
    """Log metrics to an MLflow run.

    MLflow has no histograms; of the norms by name their minimum, median, 90 % quantile and maximum
    are metrics. A call takes milliseconds, so ``every=10`` suits short steps.

    Args:
        run_id: The run; None: the one that is going on.
        prefix: Of the names.
        every: As in ``Sink``.
        norms_every: As in ``Sink``; the metrics are ``{prefix}/norms/min`` and so on.
        tracking_uri: Where the run is kept; None: as MLflow is set up.

    Raises:
        ImportError: mlflow is not installed.
        ValueError: No run is going on; or as in ``Sink``.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        prefix: str = "clip",
        every: int = 1,
        norms_every: int = 0,
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__(every=every, norms_every=norms_every)
        mlflow = _optional("mlflow", "mlflow", "mlflow")
        if run_id is None:
            active = mlflow.active_run()
            if active is None:
                raise ValueError("no MLflow run is going on; call mlflow.start_run() first")
            run_id = active.info.run_id
        self._run_id, self._prefix = run_id, prefix
        self._client = mlflow.MlflowClient(tracking_uri)
        self._metric = mlflow.entities.Metric

    def _put(self, step: Outcome, *, norms: bool) -> None:
        logged = scalars(step, self._prefix)
        values = _finite_norms(step) if norms else []
        if len(values) > 1:
            deciles = statistics.quantiles(values, n=10, method="inclusive")
            named = {"min": min(values), "median": deciles[4], "q90": deciles[8]}
            named["max"] = max(values)
            logged |= {f"{self._prefix}/norms/{name}": value for name, value in named.items()}
        now = int(step.time * 1000)
        metrics = [
            self._metric(re.sub(r"[^\w/. -]", "_", name), value, now, step.step)
            for name, value in logged.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)


class StandardLogging(Sink):
    """Write one line a step to a logger of the ``logging`` module.

    A step that is not finite or is skipped is a warning, whatever ``every`` says.

    Args:
        logger: The logger or its name.
        level: Of ordinary steps.
        every: As in ``Sink``.
        norms_every: As in ``Sink``; the three largest are named.

    Raises:
        ValueError: As in ``Sink``.
    """

    def __init__(
        self,
        logger: logging.Logger | str = "shardclip",
        *,
        level: int = logging.INFO,
        every: int = 1,
        norms_every: int = 0,
    ) -> None:
        super().__init__(every=every, norms_every=norms_every)
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level

    def _put(self, step: Outcome, *, norms: bool) -> None:
        level = self._level if step.finite and not step.skipped else logging.WARNING
        if not self._logger.isEnabledFor(level):
            return
        if step.skipped:
            what = "skipped"
        elif not step.finite:
            what = "not finite"
        else:
            limit = "" if math.isnan(step.max_norm) else f" of max_norm {step.max_norm:g}"
            did = f"clipped by {step.clip_coef:.4g}" if step.clipped else "not clipped"
            what = f"{did}{limit}, norm after {step.clipped_norm:.4g}"
        largest = sorted(step.norms.items(), key=_size, reverse=True)[:3] if norms else []
        named = ", ".join(f"{name} {value:.4g}" for name, value in largest)
        self._logger.log(
            level,
            "step %d: gradient norm %.6g, %s%s",
            step.step,
            step.total_norm,
            what,
            f"; largest: {named}" if named else "",
        )


class JsonLines(Sink):
    """Append one JSON object a step to a file, which ``shardclip plot`` and its like read.

    The format is described in ``shardclip.run_file``. Each line is handed to the operating system
    whole and at once, so that a crash of the program loses none. A file that is there already is
    continued: after a restart from a checkpoint, steps done again count as done the second time.

    Args:
        path: The file; one process alone may write it, rank 0 say. Its folder is made.
        run: The run's name, in pictures; None: the file's.
        meta: What else to keep in the header: learning rate, world size, ...
        every: As in ``Sink``.
        norms_every: As in ``Sink``; here every step by default, as the pictures show them.
        fsync: Wait after every line until it is on the disk, to outlive a crash of the machine.

    Raises:
        OSError: The file cannot be opened.
        TypeError: ``meta`` holds what JSON has no word for; at the first step.
        ValueError: As in ``Sink``.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        run: str | None = None,
        meta: Mapping[str, Any] | None = None,
        every: int = 1,
        norms_every: int = 1,
        fsync: bool = False,
    ) -> None:
        super().__init__(every=every, norms_every=norms_every)
        self.path = Path(path)
        self._name, self._meta, self._fsync = run or self.path.stem, meta or {}, fsync
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b", buffering=0)
        self._started = False

    def _put(self, step: Outcome, *, norms: bool) -> None:
        lines = run_file.step_line(step, norms=norms) + "\n"
        if not self._started:
            head = run_file.header_line(self._name, step.norm_type, self._meta)
            lines = f"{self._mended()}{head}\n{lines}"
            self._started = True
        rest = memoryview(lines.encode())
        while rest:  # a full disk may take a part, before it says so
            rest = rest[self._file.write(rest) :]
        if self._fsync:
            os.fsync(self._file.fileno())

    def _mended(self) -> str:
        """Return what ends a line that a crash has cut."""
        if self._file.seek(0, os.SEEK_END) == 0:
            return ""
        self._file.seek(-1, os.SEEK_END)
        return "" if self._file.read(1) == b"\n" else "\n"

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def scalars(step: Outcome, prefix: str) -> dict[str, float]:
    """Name a step's numbers as loggers show them, all but the norms by name.

    Args:
        step: What it found and did.
        prefix: Stands before each name, with a slash.
    """
    named = {
        "total_norm": step.total_norm,
        "clipped_norm": step.clipped_norm,
        "clip_coef": step.clip_coef,
        "clipped": float(step.clipped),
        "skipped": float(step.skipped),
    }
    if math.isfinite(step.max_norm):
        named["max_norm"] = step.max_norm
    if len(step.group_norms) > 1:
        for index, norm in enumerate(step.group_norms):
            named[f"group{index}/norm"] = norm
            named[f"group{index}/coef"] = step.group_coefs[index]
            if math.isfinite(step.max_norms[index]):
                named[f"group{index}/max_norm"] = step.max_norms[index]
    named.update({f"sum/{name}": value for name, value in step.sums.items()})
    return {f"{prefix}/{name}": value for name, value in named.items()}


def _finite_norms(step: Outcome) -> list[float]:
    return [value for value in step.norms.values() if math.isfinite(value)]


def _size(named: tuple[str, float]) -> float:
    """Sort by size, what is not finite first."""
    return named[1] if math.isfinite(named[1]) else math.inf


def _optional(module: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{package} is not installed: pip install 'shardclip[{extra}]'"
        ) from error
