"""Experiment trackers: TensorBoard, Weights & Biases, MLflow."""

import importlib
import os
import re
import statistics
from dataclasses import replace
from typing import Any

from shardclip import extras
from shardclip.record.outcome import Outcome

from . import places
from .rows import SharedRows
from .sink import Sink, finite_norms, scalars


class TensorBoard(Sink):
    """Write scalars, and the norms by name as histograms, with a ``SummaryWriter``.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``, or the folder for a new one.
        prefix: Of the tags; one for each clipper that writes there.
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
            tensorboard = extras.require(
                "torch.utils.tensorboard", extra="tensorboard", distribution="tensorboard"
            )
            writer = tensorboard.SummaryWriter(os.fspath(writer))
        self._writer, self._prefix = writer, prefix
        places.claim(self, os.path.abspath(writer.log_dir), prefix)

    def _put(self, step: Outcome, *, norms: bool) -> None:
        for tag, value in scalars(step, self._prefix).items():
            self._writer.add_scalar(tag, value, step.step, walltime=step.time or None)
        values = finite_norms(step) if norms else []
        if values:
            numpy = importlib.import_module("numpy")  # torch's SummaryWriter needs it anyway
            tag = f"{self._prefix}/norms"
            self._writer.add_histogram(
                tag, numpy.array(values), step.step, walltime=step.time or None
            )

    def close(self) -> None:
        """Flush; close the writer if it was made here."""
        places.release(self)
        self._writer.flush()
        if self._own:
            self._writer.close()


class WeightsAndBiases(Sink):
    """Log scalars, and the norms by name as histograms, to a Weights & Biases run.

    The clipper's step is logged as ``{prefix}/step`` and is the axis of all these. wandb's own step
    is left to whoever else logs: a step of the clipper joins the row under way (``commit=False``),
    one in each row, and what finds no place is written when the run finishes. So
    ``run.log(..., step=)`` loses nothing, before or after ``clip_()``, and a run that is logged to
    less often has the newest step in each row, and the others at its end. A program that is killed
    loses those.

    Args:
        run: What ``wandb.init()`` returned; None: the run that is going on.
        prefix: Of the names; one for each clipper that writes there.
        every: As in ``Sink``.
        norms_every: As in ``Sink``; the histogram is ``{prefix}/norms``.
        commit: Write a row for each step at once, and so move wandb's step on. Right where nothing
            else is logged, or all of it without ``step=`` (the Hugging Face Trainer's and
            Lightning's loggers); else wandb drops what is logged with a ``step=`` below its own.

    Raises:
        ImportError: wandb is not installed.
        ValueError: No run is going on; or as in ``Sink``.
        RuntimeError: This wandb has no way to write when a run finishes, and ``commit`` is off.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        prefix: str = "clip",
        every: int = 1,
        norms_every: int = 0,
        commit: bool = False,
    ) -> None:
        super().__init__(every=every, norms_every=norms_every)
        self._wandb = extras.require("wandb", extra="wandb")
        self._run = self._wandb.run if run is None else run
        if self._run is None:
            raise ValueError("no Weights & Biases run is going on; call wandb.init() first")
        self._prefix = prefix
        self._run.define_metric(f"{prefix}/step")
        self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")
        # In wandb's mode="shared" nobody may give a step, so nobody's can be lost.
        alone = commit or self._run.disabled or self._run.settings.mode == "shared"
        self._rows = None if alone else SharedRows(self._run, self._row)
        places.claim(self, f"the run {self._run.id}", prefix)

    def _put(self, step: Outcome, *, norms: bool) -> None:
        step = step if norms else replace(step, norms={})
        if self._rows is not None:
            self._rows.put(step)
        else:
            self._run.log(self._row(step))

    def _row(self, step: Outcome) -> dict[str, Any]:
        row: dict[str, Any] = {**scalars(step, self._prefix), f"{self._prefix}/step": step.step}
        values = finite_norms(step)
        if values:
            row[f"{self._prefix}/norms"] = self._wandb.Histogram(values)
        return row

    def close(self) -> None:
        """Finish; the run goes on, and what waits is written at its end."""
        places.release(self)


class MLflow(Sink):
    """Log metrics to an MLflow run.

    MLflow has no histograms; of the norms by name their minimum, median, 90 % quantile and maximum
    are metrics. A call takes milliseconds, so ``every=10`` suits short steps.

    Args:
        run_id: The run; None: the one that is going on.
        prefix: Of the names; one for each clipper that writes there.
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
        mlflow = extras.require("mlflow", extra="mlflow")
        if run_id is None:
            active = mlflow.active_run()
            if active is None:
                raise ValueError("no MLflow run is going on; call mlflow.start_run() first")
            run_id = active.info.run_id
        self._run_id, self._prefix = run_id, prefix
        self._client = mlflow.MlflowClient(tracking_uri)
        self._metric = mlflow.entities.Metric
        places.claim(self, f"the run {run_id}", prefix)

    def _put(self, step: Outcome, *, norms: bool) -> None:
        logged = scalars(step, self._prefix)
        values = finite_norms(step) if norms else []
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

    def close(self) -> None:
        """Finish; the run stays open."""
        places.release(self)
