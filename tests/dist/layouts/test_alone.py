"""Without a process group everything works on one process."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardclip import (
    SELF,
    GradClipper,
    NonFiniteGradientError,
    clip_by_global_norm,
    clip_grad_norm_,
    get_total_norm,
    global_norm,
)
from tests.ranks.tensors import parameter

F = torch.tensor


@pytest.fixture(autouse=True)
def _no_process_group():
    assert not dist.is_initialized()


@pytest.mark.parametrize("group", [None, SELF])
@pytest.mark.parametrize(("norm_type", "norm"), [(0, 2), (1, 7), (2, 5), (math.inf, 4)])
def test_functions(group, norm_type, norm):
    made = [parameter(F([3.0])), parameter(F([[4.0]]))]
    total = clip_grad_norm_(made, norm / 2, norm_type, group=group)
    assert total.item() == pytest.approx(norm)
    assert [one.grad.item() for one in made] == pytest.approx([1.5, 2.0])
    assert get_total_norm([F([3.0]), F([4.0])], norm_type, group=group) == pytest.approx(norm)
    assert global_norm([F([3.0]), None, F([4.0])], group=group).item() == 5.0
    assert clip_by_global_norm([F([3.0, 4.0])], 1.0, group=group)[1].item() == 5.0


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e9, 0.0])
def test_does_what_torch_does(norm_type, max_norm):
    ours, theirs = ([parameter(grad.clone()) for grad in torch.randn(3, 50)] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        one.grad.copy_(other.grad)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    norm = clip_grad_norm_(ours, max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=0)


def test_a_clipper_with_everything():
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    model["a"].weight.grad, model["b"].weight.grad = F([[3.0]]), F([[4.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    clipper = GradClipper(model, 1.0, norms="module", also=("loss",))
    before = model["a"].weight.item()
    result = clipper.step(optimizer, {"loss": 2.0})
    assert result.norms == {"a": pytest.approx(3.0), "b": pytest.approx(4.0)}
    assert result.sums == {"loss": 2.0}
    assert model["a"].weight.item() == pytest.approx(before - 0.6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_policies(bad):
    made = parameter(F([bad, 1.0]))
    with pytest.raises(RuntimeError, match=r"(?i)finite"):
        clip_grad_norm_([made], 1.0, error_if_nonfinite=True)
    with pytest.raises(NonFiniteGradientError, match="weight"):
        GradClipper([("weight", made)], 1.0, nonfinite="raise").clip_()
    assert GradClipper([("weight", made)], 1.0, nonfinite="skip").clip_().skipped
    assert made.grad[1].item() == 1.0


def test_nothing_at_all():
    with pytest.warns(UserWarning, match="(?i)gradient|empty"):
        assert clip_grad_norm_([], 1.0).item() == 0.0
    assert global_norm([]).item() == 0.0
    assert clip_by_global_norm([], 1.0)[0] == []
