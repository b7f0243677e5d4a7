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

from shardclip.record.logging import MLflow, TensorBoard, WeightsAndBiases

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

    def test_two_clippers_under_one_name_are_noticed(self, folder):
        first = TensorBoard(folder)
        other = TensorBoard(folder, prefix="other")
        with pytest.warns(
            UserWarning, match=r"another TensorBoard writes clip/\.\.\. to .*prefix="
        ):
            second = TensorBoard(folder / ".")
        for sink in (first, other, second):
            sink.close()
        TensorBoard(folder).close()  # nobody has the name any more: no warning

    def test_a_writer_of_the_caller_stays_open(self, folder):
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        writer = tensorboard.SummaryWriter(str(folder))
        send(TensorBoard(writer))
        writer.add_scalar("mine", 1.0, 1)
        writer.close()
        events = self.read(folder)
        assert {"mine", "clip/total_norm"} <= set(events.Tags()["scalars"])


WANDB = """
import sys
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

# How else a run is logged to, by name, at the clipper's step t from 0 on.
LOGGED = """
def never(run, t): pass
def before(run, t):
    run.log({"loss": t}, step=t)
after = resumed = ended_by_with = before
def tenth(run, t):
    if t % 10 == 0: run.log({"loss": t}, step=t)
def ends(run, t):
    if t in (0, 19): run.log({"loss": t}, step=t)
def epochs(run, t):
    if t % 10 == 9: run.log({"loss": t}, step=t // 10)
def plain(run, t):
    run.log({"loss": t})
def twice(run, t):
    run.log({"loss": t}, step=t)
    run.log({"accuracy": t}, step=t)
"""

SHARED = (
    """
import os, sys
import wandb
from shardclip.logging import WeightsAndBiases
from tests.record.runs import outcome
"""
    + LOGGED
    + """
for name in sys.argv[2:]:
    log = globals()[name]
    first = 100 if name == "resumed" else 0
    for sinks in (1, 2):
        folder = os.path.join(sys.argv[1], f"{name}{sinks}")
        os.mkdir(folder)
        run = wandb.init(mode="offline", dir=folder, project="shardclip")
        if first:
            run.log({"loss": first - 1}, step=first - 1)
        open_ = [WeightsAndBiases(prefix=f"clip{i}", every=2 * i + 1) for i in range(sinks)]
        for t in range(first, first + 20):
            if name in ("before", "ends"): log(run, t)
            for sink in open_:
                sink.write(outcome(t + 1, 5.0, skipped=t == first + 15))
            if name not in ("before", "ends"): log(run, t)
        for sink in open_:
            sink.close()
        if name == "after":  # once more when the sinks are closed, and a row they must not touch
            run.log({"final": 1.0}, step=first + 20)
        if name == "ended_by_with":
            with run: pass
        else:
            run.finish()
"""
)


def in_wandb(code, *arguments):
    """Run code in a process of its own: wandb starts a service."""
    package("wandb")
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
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
    assert "failed; it gets no more" not in done.stderr
    return done


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


def wandb_file(folder):
    """Read what wandb has kept of a run, as it came."""
    kinds = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return [kinds.Record.FromString(data) for data in wandb_records(path.read_bytes())]


def wandb_items(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def wandb_history(folder):
    """Read the rows that wandb has kept."""
    rows = [record.history for record in wandb_file(folder) if record.HasField("history")]
    return [wandb_items(row.item) for row in rows]


def wandb_summary(folder):
    """Read what wandb shows of the run as a whole: what came last, by name."""
    shown = {}
    for record in wandb_file(folder):
        if record.HasField("history"):
            shown |= wandb_items(record.history.item)
        elif record.HasField("summary"):
            shown |= wandb_items(record.summary.update)
    return shown


@pytest.mark.processes
def test_weights_and_biases(tmp_path):
    done = in_wandb(WANDB, tmp_path)
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


USERS = {  # what each gets to keep: its rows' wandb step, and what stands in them
    "never": {},
    "before": {t: t for t in range(20)},
    "after": {t: t for t in range(20)},
    "ended_by_with": {t: t for t in range(20)},
    "plain": {t: t for t in range(20)},
    "twice": {t: t for t in range(20)},
    "tenth": {0: 0, 10: 10},
    "ends": {0: 0, 19: 19},  # the newest step is written before others that wait
    "epochs": {0: 9, 1: 19},
    "resumed": {t: t for t in range(99, 120)},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    in_wandb(SHARED, folder, *USERS)
    return folder


@pytest.mark.parametrize("sinks", [1, 2])
@pytest.mark.parametrize("user", USERS)
def test_weights_and_biases_loses_nothing_of_whoever_else_logs(shared, user, sinks):
    rows = wandb_history(shared / f"{user}{sinks}")
    kept = {row["_step"]: row["loss"] for row in rows if "loss" in row}
    assert kept == USERS[user]
    if user == "twice":
        assert {row["_step"]: row["accuracy"] for row in rows if "accuracy" in row} == kept
    if user == "after":
        assert [row["_step"] for row in rows if "final" in row] == [20]
    first = 100 if user == "resumed" else 0
    for sink in range(sinks):
        written = [row[f"clip{sink}/step"] for row in rows if f"clip{sink}/step" in row]
        every = 2 * sink + 1
        due = [t for t in range(first + 1, first + 21) if t % every == 0 or t == first + 16]
        assert sorted(written) == due  # each once, the skipped one at any rate
        if user in ("never", "before", "after", "plain", "resumed"):
            assert written == due  # and in order
        values = [row[f"clip{sink}/total_norm"] for row in rows if f"clip{sink}/step" in row]
        assert values == [5.0] * len(due)
        assert wandb_summary(shared / f"{user}{sinks}")[f"clip{sink}/step"] == due[-1]


COMMITTED = """
import sys
import wandb
from shardclip.logging import WeightsAndBiases
from tests.record.runs import outcome
run = wandb.init(mode="offline", dir=sys.argv[1], project="shardclip")
at_once, waits = WeightsAndBiases(commit=True), WeightsAndBiases(prefix="waits")
WeightsAndBiases()  # a name that is taken
for t in range(20):
    at_once.write(outcome(t + 1, 5.0))
    if t % 10 == 0: run.log({"loss": t})
print(run.step)
for t in range(1500):
    waits.write(outcome(t + 1, 5.0))
run.finish()
"""


def test_weights_and_biases_writes_rows_of_its_own_if_told_to(tmp_path):
    done = in_wandb(COMMITTED, tmp_path)
    rows = wandb_history(tmp_path)
    assert done.stdout.split()[-1] == "22"  # its rows are there at once
    assert [row["clip/step"] for row in rows if "clip/step" in row] == list(range(1, 21))
    assert [row["loss"] for row in rows if "loss" in row] == [0, 10]
    waited = [row["waits/step"] for row in rows if "waits/step" in row]
    assert waited == list(range(1, 1501))
    assert done.stderr.count("steps wait to be written when the Weights & Biases run finishes") == 1
    assert "another WeightsAndBiases writes clip/... to the run" in done.stderr


FRAMEWORKS = """
import os, sys, types
import wandb
from shardclip.logging import WeightsAndBiases
from tests.record.runs import outcome

def transformers(run):
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.integrations import WandbCallback
    arguments = TrainingArguments(sys.argv[1], report_to=[], use_cpu=True)
    state, callback = TrainerState(is_world_process_zero=True), WandbCallback()
    callback.setup(arguments, state, None)
    def log(t):
        state.global_step = t
        callback.on_log(arguments, state, TrainerControl(), logs={"loss": t})
    return log

def lightning(run):
    from lightning.pytorch.loggers import WandbLogger
    logger = WandbLogger(experiment=run)
    return lambda t: logger.log_metrics({"train/loss": t}, step=t)

def accelerate(run):
    from accelerate import PartialState
    from accelerate.tracking import WandBTracker
    PartialState(cpu=True)
    tracker = WandBTracker("shardclip")
    tracker.run = run
    return lambda t: tracker.log({"train/loss": t}, step=t)

name = sys.argv[2]
run = wandb.init(mode="offline", dir=sys.argv[1], project="shardclip")
log = globals()[name](run)
sinks = [WeightsAndBiases(), WeightsAndBiases(prefix="other")]
for t in range(20):
    for sink in sinks:
        sink.write(outcome(t + 1, 5.0))
    if t % 2 == 0:
        log(t)
run.finish()
"""


@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate"])
@pytest.mark.filterwarnings("default")
def test_weights_and_biases_beside_a_frameworks_own_logger(tmp_path, framework):
    package("wandb")
    package(framework)
    in_wandb(FRAMEWORKS, tmp_path, framework)
    rows = wandb_history(tmp_path)
    assert [row["train/loss"] for row in rows if "train/loss" in row] == list(range(0, 20, 2))
    for prefix in ("clip", "other"):
        steps = [row[f"{prefix}/step"] for row in rows if f"{prefix}/step" in row]
        assert sorted(steps) == list(range(1, 21))


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


def test_two_clippers_in_one_mlflow_run(mlflow):
    run = mlflow.start_run()
    first, other = MLflow(), MLflow(prefix="other")
    with pytest.warns(UserWarning, match=r"another MLflow writes clip/\.\.\. to the run"):
        MLflow()
    for sink in (first, other):
        send(sink)
    history = mlflow.MlflowClient().get_metric_history
    for prefix in ("clip", "other"):
        steps = [metric.step for metric in history(run.info.run_id, f"{prefix}/total_norm")]
        assert sorted(steps) == [1, 2, 3, 4]


def test_wandb_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install 'wandb>="):
        WeightsAndBiases()
