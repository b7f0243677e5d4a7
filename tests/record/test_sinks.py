"""What all sinks share, and the standard logging module."""

import logging
import math
import sys

import pytest
import torch
from torch import nn

from shardclip import GradClipper
from shardclip.record.logging import JsonLines, MLflow, Sink, StandardLogging, TensorBoard
from shardclip.record.logging.sink import scalars
from shardclip.record.outcome import Outcome
from shardclip.record.run_file import read

from .runs import outcome, steps


class Kept(Sink):
    def __init__(self, **options):
        super().__init__(**options)
        self.put = []

    def _put(self, step, *, norms):
        self.put.append((step.step, norms))


def test_every_so_many_steps_but_always_what_is_not_finite():
    sink = Kept(every=3)
    for step in steps(7, nonfinite=(5,)):
        sink.write(step)
    assert sink.put == [(3, False), (5, False), (6, False)]


def test_a_skipped_spike_is_written_whatever_the_interval(caplog):
    sink, log = Kept(every=10), StandardLogging("training.clip", every=10)
    spike = outcome(7, 90.0, skipped=True)
    sink.write(spike)
    log.write(spike)
    assert sink.put == [(7, False)]
    assert [(entry.levelname, entry.message) for entry in caplog.records] == [
        ("WARNING", "step 7: gradient norm 90, skipped")
    ]


def test_norms_at_an_interval_and_only_where_there_are_any():
    sink = Kept(norms_every=2)
    for step in [*steps(4), outcome(5), outcome(6)]:
        sink.write(step)
    assert [norms for _, norms in sink.put] == [False, True, False, True, False, False]


@pytest.mark.parametrize("options", [{"every": 0}, {"norms_every": -1}])
def test_wrong_intervals_are_refused(options):
    with pytest.raises(ValueError, match="every must be at least 1 step"):
        Kept(**options)


def test_the_callers_step_comes_first_then_the_results_then_a_count():
    sink = Kept()
    sink.write(outcome(0))
    sink.write(outcome(7))
    sink.write(outcome(8), step=50)
    assert [step for step, _ in sink.put] == [1, 7, 50]


def test_a_clip_result_is_taken_as_it_is(tmp_path):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    log = JsonLines(tmp_path / "a.jsonl")
    log.write(GradClipper([("w", parameter)], 2.5, norms="parameter").clip_(), step=12)
    log.close()
    (step,) = read(log.path).steps
    assert (step.step, step.total_norm, step.norms) == (12, 5.0, {"w": 5.0})
    assert step.clip_coef == pytest.approx(0.5, rel=1e-5)


def test_numbers_of_groups_are_named():
    step = Outcome(5.0, (3.0, 4.0), (1.0, 0.5), (math.inf, 2.0), sums={"loss": 1.0}, step=1)
    named = scalars(step, "clip")
    assert named["clip/group0/norm"] == 3.0
    assert named["clip/group1/coef"] == 0.5
    assert named["clip/group1/max_norm"] == 2.0
    assert "clip/group0/max_norm" not in named
    assert "clip/max_norm" not in named
    assert named["clip/sum/loss"] == 1.0
    assert scalars(outcome(max_norm=2.0), "x")["x/max_norm"] == 2.0


def test_standard_logging(caplog):
    log = StandardLogging("training.clip", every=2, norms_every=4)
    with caplog.at_level(logging.INFO, "training.clip"):
        for step in (outcome(1, 9.0), outcome(2, 4.0), outcome(4, 0.5, norms={"a": 0.3, "b": 0.4})):
            log.write(step)
        log.write(outcome(5, math.nan))
        log.write(outcome(7, math.inf, skipped=True))
    assert caplog.messages == [
        "step 2: gradient norm 4, clipped by 0.25 to 1 (max_norm 1)",
        "step 4: gradient norm 0.5, not clipped (max_norm 1); largest: b 0.4, a 0.3",
        "step 5: gradient norm nan, not finite",
        "step 7: gradient norm inf, skipped",
    ]
    levels = [entry.levelname for entry in caplog.records]
    assert levels == ["INFO", "INFO", "WARNING", "WARNING"]


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (lambda: TensorBoard("somewhere"), "torch.utils.tensorboard", "tensorboard"),
        (MLflow, "mlflow", "mlflow"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, make, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install '{module.split('.')[-1]}"):
        make()
