"""The demo alone in one process, stopped or killed anywhere: it goes on as if it had not been."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardclip.record.run_file import read
from tests.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("whole training")]
TRAIN_LM = Path(__file__).parents[2] / "examples" / "train_lm.py"
SMALL = ("--steps=2", "--files=40", "--batch=1", "--checks=0")


def start(out, *more, **environ):
    return subprocess.Popen(
        [sys.executable, TRAIN_LM, *SMALL, "--out", out, *more],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def train(out, *more, code=0, **environ):
    process = start(out, *more, **environ)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, errors
    return output + errors


def metrics(out):
    runs = [read(out / f"{name}.jsonl") for name in ("unclipped", "clipped")]
    steps = [step for run in runs for step in run.steps]
    return [replace(step, time=0.0, sums=step.sums | {"stop": 0.0}) for step in steps]


def lines(out, run):
    path = out / f"{run}.jsonl"
    found = path.read_text().splitlines() if path.exists() else []
    return [line for line in found if "format" not in json.loads(line)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    train(out)
    steps = metrics(out)
    assert [step.step for step in steps] == [1, 2, 1, 2]
    return steps


def test_stopped_in_a_run_and_at_its_end(tmp_path, whole):
    out, stop, marker = tmp_path / "out", tmp_path / "stop", tmp_path / "stopped"
    stop.touch()
    told = {"SHARDCLIP_STOP_FILE": str(stop), "SHARDCLIP_STOP_MARKER": str(marker)}
    for step in (1, 2):
        assert f"stopped after step {step};" in train(out, **told)
        assert marker.read_text() == f"{step}\n"
    assert not (out / "clipped.jsonl").exists()
    refusal = train(out, "--lr=0.1", code=1)
    assert "holds a training with lr 0.004, now 0.1" in refusal
    train(out)
    assert metrics(out) == whole


def test_killed_after_a_save(tmp_path, whole):
    process = start(tmp_path, "--save-every=1")
    wait_for((tmp_path / "checkpoint/latest.json").exists)
    process.kill()
    process.communicate()
    latest = json.loads((tmp_path / "checkpoint/latest.json").read_text())
    done = {"unclipped": 0, "clipped": 0} | dict.fromkeys(latest["progress"]["validation"], 2)
    done[latest["progress"]["run"]] = latest["progress"]["step"]
    assert any(done.values())
    before = {run: lines(tmp_path, run)[:steps] for run, steps in done.items()}
    train(tmp_path)
    assert metrics(tmp_path) == whole
    # it went on from there, and did not train those steps again
    assert {run: lines(tmp_path, run)[:steps] for run, steps in done.items()} == before
