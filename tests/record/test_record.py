"""The running record: counts, windows, and that adding waits for nothing and keeps nothing."""

import gc
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from shardclip import ClipResult, GradClipper
from shardclip.record import record as record_module
from shardclip.record.outcome import Heading, Outcome
from shardclip.record.record import Record

ROOT = Path(__file__).parents[2]


def clipped_steps(sizes, **options):
    """A record of real steps on one parameter whose gradient has these norms."""
    parameter = nn.Parameter(torch.zeros(2))
    clipper = GradClipper([("weight", parameter)], 1.0, **options)
    record = Record()
    for size in sizes:
        parameter.grad = torch.tensor([0.6, 0.8]) * size
        record.add(clipper.clip_())
    return record


def test_it_counts_what_was_clipped_and_skipped():
    record = clipped_steps([0.5, 2.0, math.nan, 4.0, 0.25], nonfinite="skip")
    assert (record.steps, record.clipped, record.skipped, record.nonfinite) == (5, 2, 1, 1)
    assert record.share_clipped() == 2 / 5
    assert record.share_clipped(window=2) == 1 / 2
    assert record.share_clipped(window=1) == 0.0


def test_it_keeps_norms_before_and_after():
    record = clipped_steps([0.5, 4.0], norms="parameter")
    assert [step.total_norm for step in record] == pytest.approx([0.5, 4.0])
    assert [step.clipped_norm for step in record] == pytest.approx([0.5, 1.0], rel=1e-5)
    assert record[-1].clip_coef == pytest.approx(0.25, rel=1e-5)
    assert record[-1].norms == {"weight": pytest.approx(4.0)}
    assert [step.total_norm for step in record[-2:]] == [step.total_norm for step in record]


def test_a_record_says_what_the_result_says():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    clipper = GradClipper([("a", parameter)], 2.0, norms="parameter", also=("loss",))
    result = clipper.clip_(also={"loss": 1.5})
    record = Record()
    record.add(result)
    assert record[0] == result.outcome
    assert record[0].as_dict() == result.as_dict()
    assert record[0].as_dict()["sum/loss"] == 1.5


def test_groups_with_their_own_thresholds():
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    first.grad, second.grad = torch.tensor([6.0]), torch.tensor([0.5])
    clipper = GradClipper([{"params": [first], "max_norm": 2.0}, {"params": [second]}], 1.0)
    record = Record()
    record.add(clipper.clip_())
    assert record[0].group_norms == (6.0, 0.5)
    assert record[0].group_coefs == pytest.approx((1 / 3, 1.0), rel=1e-5)
    assert record[0].clipped_norm == pytest.approx(math.hypot(2.0, 0.5), rel=1e-5)


def test_the_summary_is_of_the_window():
    summary = clipped_steps([8.0, 0.5, 2.0, 4.0]).summary(window=3)
    assert summary["steps"] == 4
    assert summary["clipped"] == 3
    assert summary["share_clipped"] == pytest.approx(2 / 3)
    assert summary["median_norm"] == pytest.approx(2.0)
    assert summary["largest_norm"] == pytest.approx(4.0)
    assert summary["median_clipped_norm"] == pytest.approx(1.0, rel=1e-5)


def test_without_steps_there_is_no_share():
    record = Record()
    assert math.isnan(record.share_clipped())
    assert record.summary()["steps"] == 0
    with pytest.raises(IndexError):
        _ = record[-1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Record(keep=1), "keep must be at least 2"),
        (lambda: Record().share_clipped(0), "window must be at least 1"),
    ],
)
def test_wrong_numbers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Numbers:
    """Stands for a result on a device: its numbers arrive when the test says so."""

    arrived = 0
    waited: ClassVar[list[int]] = []

    def __init__(self, step, norm=2.0, skipped=False):
        self.heading = Heading(1, (), (), 2.0, (1.0,), skipped, step, 0.0)
        self.device = torch.device("cuda")
        self.norm = norm

    def packed(self):
        return self

    def to(self, device, *, non_blocking):
        assert device == "cpu"
        assert non_blocking
        return torch.tensor([self.norm, self.norm, min(1.0, 1 / self.norm)], dtype=torch.float64)


class Event:
    """Done once ``Numbers.arrived`` counts it."""

    made = 0

    def __init__(self, device):
        assert device.type == "cuda"
        Event.made += 1
        self.number = Event.made

    def record(self, stream):
        assert stream == "its own"

    def query(self):
        return self.number <= Numbers.arrived

    def synchronize(self):
        if not self.query():
            Numbers.waited.append(self.number)


class Taker:
    def __init__(self):
        self.steps = []
        self.closed = False

    def write(self, result, step=None):
        self.steps.append(result.step)

    def close(self):
        self.closed = True


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "its own")
    Event.made = Numbers.arrived = 0
    Numbers.waited = []


@pytest.mark.usefixtures("device")
def test_adding_waits_for_nothing_and_sends_a_step_late():
    record, taker = Record(), Taker()
    record.send_to(taker)
    seen = []
    for step in range(1, 6):
        record.add(Numbers(step))
        Numbers.arrived = step  # while the next step computes
        seen.append(list(taker.steps))
    assert seen == [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert Numbers.waited == []
    assert record[-2].step == 4
    assert Numbers.waited == []
    Numbers.arrived = 4
    assert record.clipped == 5
    assert Numbers.waited == [5]
    assert taker.steps == [1, 2, 3, 4, 5]
    record.close()
    assert taker.closed


def test_nothing_is_taken_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(record_module, "is_capturing", lambda: True)
    record = Record()
    record.add(object())
    assert record.steps == 0


@pytest.mark.usefixtures("device")
def test_reading_a_step_waits_for_that_one_alone():
    record = Record()
    for step in range(1, 4):
        record.add(Numbers(step))
    assert record[1].step == 2
    assert Numbers.waited == [2]


@pytest.mark.usefixtures("device")
def test_old_steps_stay_in_the_counts():
    record = Record(keep=3)
    for step in range(1, 11):
        record.add(Numbers(step, norm=0.5 if step > 8 else 2.0))
        Numbers.arrived = step - 1
    assert Numbers.waited == []  # the oldest had arrived before it was dropped
    assert len(record) == 3
    assert [step.step for step in record] == [8, 9, 10]
    assert (record.steps, record.clipped) == (10, 8)
    assert record.share_clipped() == pytest.approx(1 / 3)


@pytest.mark.usefixtures("device")
def test_the_numbers_are_copied_before_the_next_step_can_change_them():
    """What ``packed`` returns must be new: clip_ may use its payload again."""
    parameter = nn.Parameter(torch.zeros(2))
    clipper = GradClipper([parameter], 1.0)
    parameter.grad = torch.tensor([3.0, 4.0])
    result = clipper.clip_()
    packed = result.packed()
    held = {result._measured.total_norm.data_ptr(), result._coefs.data_ptr()}
    assert packed.data_ptr() not in held
    assert packed.data_ptr() != result._measured.payload.data_ptr()


def test_neither_gradients_nor_parameters_are_kept():
    parameter = nn.Parameter(torch.zeros(2))
    clipper = GradClipper([parameter], 1.0)
    record = Record()
    parameter.grad = torch.tensor([3.0, 4.0])
    gradient, owner = weakref.ref(parameter.grad), weakref.ref(parameter)
    record.add(clipper.clip_())
    parameter.grad = None
    gc.collect()
    assert gradient() is None
    del clipper, parameter
    gc.collect()
    assert owner() is None
    assert record[0].total_norm == 5.0


def test_a_sink_that_fails_is_dropped_and_said_so(caplog):
    class Full(Taker):
        def write(self, result, step=None):
            raise OSError("disk full")

    record, taker = clipped_steps([]), Taker()
    record.send_to(Full(), taker)
    for step in (1, 2):
        record.add(Arrived(step))
    assert taker.steps == [1, 2]
    (said,) = caplog.records
    assert "failed; it gets no more" in said.message
    assert "disk full" in caplog.text


def test_a_sink_gets_no_step_from_before():
    record, taker = Record(), Taker()
    record.add(Arrived(1))
    record.send_to(taker)
    record.add(Arrived(2))
    assert taker.steps == [2]
    assert record.clipped == 2


class Arrived:
    """A result on CPU."""

    def __init__(self, step):
        self.heading = Heading(1, (), (), 2.0, (1.0,), False, step, 0.0)

    def packed(self):
        return torch.tensor([2.0, 2.0, 0.5], dtype=torch.float64)


@pytest.mark.processes
def test_the_rest_is_sent_at_exit(tmp_path):
    """A record whose last steps arrived after the last call; the program just ends."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from shardclip.logging import JsonLines
from shardclip.record.record import Record, _Arriving
from tests.record.test_record import Arrived
late = []
_Arriving.has_arrived = lambda self: bool(late)
record = Record()
record.send_to(JsonLines({str(tmp_path / "run.jsonl")!r}))
for step in (1, 2, 3):
    record.add(Arrived(step))
assert not open({str(tmp_path / "run.jsonl")!r}).read()
late.append(True)
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 4


def test_what_only_the_device_knows_is_read_with_the_rest():
    heading = Heading(2, ("a",), ("n",), 2.0, None, None, 7, 0.0)
    found = heading.outcome([5.0, 3.0, 4.0, 0.5, 1.0, 1.5, 9.0, 1.0, 6.0, 8.0])
    assert found == Outcome(
        5.0, (3.0, 4.0), (0.5, 1.0), (1.5, 9.0), {"a": 6.0}, {"n": 8.0}, 2.0, True, 7, 0.0
    )
    assert math.isnan(found.max_norm)


def test_a_result_packs_what_only_the_device_knows():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    result = GradClipper([("a", parameter)], 2.0, norms="parameter").clip_()
    told = ClipResult(
        result._measured,
        result._coefs,
        keys=("a",),
        skipped=torch.tensor(True),
        max_norms=torch.tensor([1.5]),
        step=3,
    )
    record = Record()
    record.add(told)
    assert told.skipped
    assert (record[0].skipped, record[0].max_norms, record[0].step) == (True, (1.5,), 3)
    assert record[0].norms == {"a": 5.0}
    assert record.skipped == 1
