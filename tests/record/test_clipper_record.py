"""``GradClipper.record``: filled by every step, sent where it is wanted, at no collective."""

import math

import pytest
import torch
import torch.distributed as dist

from shardclip import GradClipper, NonFiniteGradientError
from shardclip.record.logging import JsonLines
from shardclip.record.run_file import read
from shardclip.rules.adaptive import AutoClip
from tests.ranks import on_ranks, raised_everywhere, same_everywhere
from tests.ranks.clippers import counted, shard


@on_ranks(2)
def test_every_step_is_recorded_alike_on_all_ranks():
    parameter = shard([0.0, 0.0])
    clipper = GradClipper([("a", parameter)], 1.0, nonfinite="skip", norms="parameter")
    for size in (0.1, 1.0, math.nan, 2.0):
        parameter.grad = shard([3.0 * size, 4.0 * size]).grad
        if math.isnan(size):
            clipper.clip_()  # gathers what was not finite
        else:
            counted(clipper)  # one all-reduce, with a record as without
    record = clipper.record
    assert [step.step for step in record] == [1, 2, 3, 4]
    assert [step.total_norm for step in record][:2] == pytest.approx([0.5, 5.0])
    assert record[-1].norms["a"] == pytest.approx(10.0)
    assert (record.steps, record.clipped, record.skipped, record.nonfinite) == (4, 2, 1, 1)
    assert {step.max_norm for step in record} == {1.0}
    told = [(step.total_norm, step.clip_coef, step.norms) for step in record if step.finite]
    assert same_everywhere(told)


@on_ranks(2)
def test_one_rank_alone_may_write_it(tmp_path):
    parameter = shard([0.0, 0.0])
    clipper = GradClipper([{"params": [parameter], "max_norm": 2.0}], 1.0)
    path = tmp_path / "run.jsonl"
    if dist.get_rank() == 0:
        clipper.record.send_to(JsonLines(path, meta={"world_size": 2}))
    for _ in range(3):
        parameter.grad = shard([3.0, 4.0]).grad
        counted(clipper)
    clipper.record.close()
    if dist.get_rank() == 0:
        run = read(path)
        assert [step.clipped_norm for step in run.steps] == pytest.approx([2.0] * 3, rel=1e-5)
        assert run.steps[0].max_norm == 2.0


def test_a_threshold_changed_between_steps_is_recorded():
    parameter = torch.nn.Parameter(torch.zeros(1))
    clipper = GradClipper([parameter], 4.0)
    for limit in (4.0, 1.0, None):
        clipper.max_norm = limit
        parameter.grad = torch.ones(1) * 2
        clipper.clip_()
    assert [step.max_norm for step in clipper.record] == [4.0, 1.0, math.inf]
    assert [step.clipped for step in clipper.record] == [False, True, False]


@on_ranks(2)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("limit", [1.0, None, AutoClip()])
def test_the_step_that_raised_is_recorded_alike_on_all_ranks(tmp_path, exact, limit):
    parameter = shard([0.0, 0.0])
    clipper = GradClipper(
        [("a", parameter)], limit, nonfinite="raise", norms="parameter", also=("loss",), exact=exact
    )
    path = tmp_path / f"{dist.get_rank()}.jsonl"
    clipper.record.send_to(JsonLines(path))
    parameter.grad = shard([3.0, 4.0]).grad
    counted(clipper)
    parameter.grad = shard([3.0, math.inf]).grad
    raised_everywhere(lambda: clipper.clip_(also={"loss": 2.0}), NonFiniteGradientError, "a")
    step = clipper.record[-1]
    assert (step.step, step.finite, step.skipped, step.clip_coef) == (2, False, True, 1.0)
    assert (step.sums["loss"], clipper.record.nonfinite) == (4.0, 1)
    assert step.max_norm == (1.0 if limit == 1.0 else math.inf)
    assert not math.isfinite(step.norms["a"])
    assert same_everywhere(step.as_dict() | {"total_norm": repr(step.total_norm)})
    # its line is in the file although the program may end here
    assert not read(path).steps[1].finite
