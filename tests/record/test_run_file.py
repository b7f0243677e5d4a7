"""The file's format: what is written is read again, is strict JSON, and survives a crash."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardclip.record.logging import JsonLines
from shardclip.record.outcome import Outcome
from shardclip.record.run_file import RunFileError, read

from .runs import outcome, steps, written

ROOT = Path(__file__).parents[2]
LIMIT = st.floats(min_value=0)
NUMBER = LIMIT | st.just(math.nan)
NAMES = st.dictionaries(st.text(max_size=8), NUMBER, max_size=3)


def refuse_constants(name):
    raise AssertionError(f"{name} is not JSON")


def lines_of(path):
    return [
        json.loads(line, parse_constant=refuse_constants)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(NUMBER, NUMBER, LIMIT), min_size=1, max_size=3),
    NAMES,
    NAMES,
    st.booleans(),
)
def test_a_step_is_read_as_it_was_written(tmp_path_factory, groups, norms, sums, skipped):
    norms_, coefs, limits = zip(*groups, strict=True)
    total = max(norms_)
    step = Outcome(total, norms_, coefs, limits, norms, sums, 3.0, skipped, 5, 12.5)
    path = written(tmp_path_factory.mktemp("run") / "a.jsonl", [step])
    lines_of(path)
    (found,) = read(path).steps
    assert repr(found) == repr(step)  # which tells NaN from NaN apart from nothing


def test_the_header_tells_what_the_steps_cannot(tmp_path):
    path = tmp_path / "new" / "a.jsonl"
    meta = {"lr": 3e-4, "best": math.inf, "ranks": [0, math.nan]}
    written(path, [outcome()], run="my run", meta=meta)
    header, step = lines_of(path)
    assert header["format"] == "shardclip-steps"
    assert header["version"] == 1
    assert header["norm_type"] == 2.0
    assert header["run"] == "my run"
    assert header["meta"] == {"lr": 3e-4, "best": "Infinity", "ranks": [0, "NaN"]}
    assert read(path).name == "my run"
    assert set(step) == {
        "step", "time", "total_norm", "clipped_norm", "clip_coef", "max_norm", "clipped",
        "skipped", "finite",
    }  # fmt: skip


def test_what_is_not_finite_is_written_by_name(tmp_path):
    path = written(tmp_path / "a.jsonl", [outcome(1, math.nan), outcome(2, math.inf)])
    _, nan, inf = lines_of(path)
    assert (nan["total_norm"], nan["finite"], nan["clip_coef"]) == ("NaN", False, "NaN")
    assert inf["total_norm"] == "Infinity"


def test_no_threshold_is_null(tmp_path):
    path = written(tmp_path / "a.jsonl", [outcome(1, 2.0, math.inf)])
    assert lines_of(path)[1]["max_norm"] is None
    assert read(path).steps[0].max_norm == math.inf


def test_groups_are_written_where_there_are_several(tmp_path):
    step = Outcome(5.0, (3.0, 4.0), (1.0, 0.5), (math.inf, 2.0), step=1)
    line = lines_of(written(tmp_path / "a.jsonl", [step]))[1]
    assert line["groups"] == [
        {"norm": 3.0, "coef": 1.0, "max_norm": None},
        {"norm": 4.0, "coef": 0.5, "max_norm": 2.0},
    ]
    assert line["max_norm"] is None
    assert line["clipped_norm"] == pytest.approx(math.hypot(3, 2))


@pytest.mark.processes
def test_a_killed_program_loses_no_step(tmp_path):
    path = tmp_path / "a.jsonl"
    code = f"""
import os, signal
from shardclip.logging import JsonLines
from tests.record.runs import outcome
log = JsonLines({str(path)!r})
for step in (1, 2, 3):
    log.write(outcome(step))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == -signal.SIGKILL
    assert [step.step for step in read(path).steps] == [1, 2, 3]


def test_a_line_that_a_crash_has_cut_is_passed_over(tmp_path):
    path = written(tmp_path / "a.jsonl", steps(5))
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 20)
    run = read(path)
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    assert run.notes == ["line 6 was cut short and is left out"]


def test_a_run_goes_on_after_a_crash(tmp_path):
    """Steps 4 and 5 were done, the checkpoint was of step 3, and the last line is cut."""
    path = written(tmp_path / "a.jsonl", [outcome(step, 2.0) for step in range(1, 7)])
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 20)
    written(path, [outcome(step, 8.0) for step in range(4, 8)])
    run = read(path)
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [step.total_norm for step in run.steps] == [2.0] * 3 + [8.0] * 4
    assert run.notes[0] == "line 7 was cut short and is left out"
    assert "continued at step 4 after step 5" in run.notes[1]


def test_lines_of_others_are_read_if_they_have_a_norm(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"loss": 1, "total_norm": 2.0, "max_norm": 1}\n{"total_norm": NaN}\n')
    run = read(path)
    assert run.name == "metrics"
    assert [step.step for step in run.steps] == [1, 2]
    assert run.steps[0].clip_coef == pytest.approx(0.5, rel=1e-5)
    assert not run.steps[1].finite
    assert run.notes == ["no header: read as p = 2"]


HEADER = '{"format": "shardclip-steps", "version": 1, "norm_type": 2.0}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; the run has not written a step yet"),
        ("\n\n", "is empty"),
        (HEADER + "\n", "has a header but no step"),
        ("hello\nworld\n", "line 1: no JSON object; give a file of JSON lines"),
        ("hello", "line 1: no JSON object"),
        ("[1, 2]\n[3]\n", "line 1: no JSON object"),
        (HEADER + '\n{"total_norm": 1\n{"total_norm": 1}\n', "line 2: no JSON object"),
        ('{"loss": 1.0}\n', "line 1: no 'total_norm'"),
        ('{"total_norm": "large"}\n', "line 1: could not convert"),
        ('{"total_norm": 1, "groups": 3}\n', "line 1: 'int' object is not iterable"),
        (HEADER.replace('"version": 1', '"version": 2'), "version 2 .* upgrade shardclip"),
        ('{"format": "other"}\n', "the format is 'other'"),
        ("\0\1\2\n\3\n", "line 1: no JSON object"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(RunFileError, match=re.escape(str(path)) + ".*" + message):
        read(path)


@pytest.mark.parametrize(
    ("name", "message"), [("none.jsonl", "no such file or directory"), (".", "is a directory")]
)
def test_a_file_that_cannot_be_read_is_said_so(tmp_path, name, message):
    with pytest.raises(RunFileError, match=message + "; give a file that JsonLines wrote"):
        read(tmp_path / name)


def test_norms_at_an_interval(tmp_path):
    path = written(tmp_path / "a.jsonl", steps(6), norms_every=3)
    assert ["norms" in line for line in lines_of(path)[1:]] == [False, False, True] * 2
    path = written(tmp_path / "b.jsonl", steps(6), norms_every=0)
    assert not any("norms" in line for line in lines_of(path))


def test_fsync_waits_for_every_line(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    written(tmp_path / "a.jsonl", steps(3), fsync=True)
    assert len(synced) == 3


def test_a_name_that_json_has_no_word_for_is_refused(tmp_path):
    log = JsonLines(tmp_path / "a.jsonl", meta={"model": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        log.write(outcome())
    log.close()
