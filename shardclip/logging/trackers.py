"""Experiment trackers: TensorBoard, Weights & Biases, MLflow."""

import importlib
import os
import re
import statistics
from typing import Any

from shardclip import extras
from shardclip.outcome import Outcome

from .sink import Sink, finite_norms, scalars


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
            tensorboard = extras.require(
                "torch.utils.tensorboard", extra="tensorboard", distribution="tensorboard"
            )
            writer = tensorboard.SummaryWriter(os.fspath(writer))
        self._writer, self._prefix = writer, prefix

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
        self._wandb = extras.require("wandb", extra="wandb")
        self._run = self._wandb.run if run is None else run
        if self._run is None:
            raise ValueError("no Weights & Biases run is going on; call wandb.init() first")
        self._prefix = prefix
        self._run.define_metric(f"{prefix}/step")
        self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def _put(self, step: Outcome, *, norms: bool) -> None:
        logged: dict[str, Any] = dict(scalars(step, self._prefix))
        values = finite_norms(step) if norms else []
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
        mlflow = extras.require("mlflow", extra="mlflow")
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
