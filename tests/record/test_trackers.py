"""TensorBoard, Weights & Biases and MLflow: the real packages, without a network."""

import importlib
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from shardclip.logging import MLflow, TensorBoard, WeightsAndBiases

from .runs import outcome

ROOT = Path(__file__).parents[2]
REQUIRED = "SHARDCLIP_REQUIRE_TRACKERS"
NORMS = {"a": 3.0, "b": 4.0, "c": math.nan}
STEPS = [
    outcome(1, 5.0, norms=NORMS, sums={"loss (nats)": 2.0}),
    outcome(2, 0.5, norms=NORMS),
    outcome(3, math.nan, skipped=True),
    outcome(4, math.inf),
]


def package(name):
    """The real package; where it has to be there, its absence is a failure."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        why = f"{error}; pip install -r requirements/systems.txt"
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, but {why}")
        pytest.skip(why)


def send(sink):
    for step in STEPS:
        sink.write(step)
    sink.close()


@pytest.mark.filterwarnings("default::DeprecationWarning")
class TestTensorBoard:
    @pytest.fixture
    def folder(self, tmp_path):
        package("tensorboard")
        return tmp_path

    def read(self, folder):
        loader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        events = loader.EventAccumulator(str(folder))
        events.Reload()
        return events

    def test_scalars_are_read_again(self, folder):
        send(TensorBoard(folder))
        events = self.read(folder)
        norms = events.Scalars("clip/total_norm")
        assert [event.step for event in norms] == [1, 2, 3, 4]
        assert [event.value for event in norms[:2]] == [5.0, 0.5]
        assert math.isnan(norms[2].value)
        assert math.isinf(norms[3].value)
        assert norms[0].wall_time == STEPS[0].time
        assert [event.value for event in events.Scalars("clip/clipped")] == [1, 0, 0, 0]
        assert [event.value for event in events.Scalars("clip/skipped")] == [0, 0, 1, 0]
        assert events.Scalars("clip/sum/loss (nats)")[0].value == 2.0
        assert events.Tags()["histograms"] == []

    def test_histograms_at_an_interval_hold_the_finite_norms(self, folder):
        send(TensorBoard(folder, norms_every=2, prefix="grad"))
        (event,) = self.read(folder).Histograms("grad/norms")
        assert event.step == 2
        found = event.histogram_value
        assert (found.num, found.min, found.max, found.sum) == (2, 3, 4, 7)

    def test_a_writer_of_the_caller_stays_open(self, folder):
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        writer = tensorboard.SummaryWriter(str(folder))
        send(TensorBoard(writer))
        writer.add_scalar("mine", 1.0, 1)
        writer.close()
        events = self.read(folder)
        assert {"mine", "clip/total_norm"} <= set(events.Tags()["scalars"])


WANDB = """
import json, sys
import wandb
from shardclip.logging import WeightsAndBiases
from tests.record.test_trackers import STEPS
try:
    WeightsAndBiases()
except ValueError as error:
    print(error)
run = wandb.init(mode="offline", dir=sys.argv[1], project="shardclip")
sink = WeightsAndBiases(norms_every=2)
for step in STEPS:
    run.log({"loss": 1.0})  # the caller's own, which moves wandb's step on
    sink.write(step)
sink.close()
run.finish()
"""


def wandb_records(data):
    """Take the records from a .wandb file: LevelDB's log format after a header of 7 bytes."""
    place, parts = 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # a block's end is filled up
            place += left
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_history(folder):
    """Read the rows that wandb has kept."""
    kinds = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    for data in wandb_records(path.read_bytes()):
        record = kinds.Record.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            yield {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items
            }


@pytest.mark.processes
def test_weights_and_biases(tmp_path):
    """In a process of its own: wandb starts a service."""
    package("wandb")
    done = subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "WANDB__SERVICE_WAIT": "200",  # seconds; its service is slow to start under load
        },
    )
    assert done.returncode == 0, done.stderr
    assert "no Weights & Biases run is going on; call wandb.init() first" in done.stdout
    rows = [row for row in wandb_history(tmp_path) if "clip/step" in row]
    assert [row["clip/step"] for row in rows] == [1, 2, 3, 4]
    assert [row["clip/total_norm"] for row in rows[:2]] == [5.0, 0.5]
    assert [row["clip/skipped"] for row in rows] == [0, 0, 1, 0]
    assert rows[0]["clip/sum/loss (nats)"] == 2.0
    assert sum(rows[1]["clip/norms/values"]) == 2
    bins = rows[1]["clip/norms/bins"]
    assert (bins[0], bins[-1]) == (3.0, 4.0)
    assert [row for row in rows if "clip/norms/bins" in row] == [rows[1]]


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = package("mlflow")
    package("sqlalchemy")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    yield mlflow
    mlflow.end_run()


@pytest.mark.filterwarnings("default")  # of its own parts, about each other
def test_mlflow(mlflow):
    with pytest.raises(ValueError, match=r"no MLflow run is going on; call mlflow.start_run"):
        MLflow()
    run = mlflow.start_run()
    send(MLflow(norms_every=2))
    history = mlflow.MlflowClient().get_metric_history

    def values(name):
        return {metric.step: metric.value for metric in history(run.info.run_id, name)}

    norms = values("clip/total_norm")
    assert (norms[1], norms[2]) == (5.0, 0.5)
    assert math.isnan(norms[3])
    assert norms[4] > 1e300  # SQL has no infinity
    assert values("clip/skipped") == {1: 0, 2: 0, 3: 1, 4: 0}
    assert values("clip/sum/loss _nats_") == {1: 2.0}
    assert values("clip/norms/max") == {2: 4.0}
    assert values("clip/norms/median") == {2: 3.5}
    assert history(run.info.run_id, "clip/total_norm")[0].timestamp == STEPS[0].time * 1000


def test_wandb_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'shardclip\[wandb\]'"):
        WeightsAndBiases()
