"""Thresholds that follow the norm, against values worked out by hand."""

import copy
import io
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardclip import GradClipper
from shardclip.rules.adaptive import AutoClip, LinearWarmup, RunningMean, Threshold, ZClip


def follow(rule, norms) -> list[float]:
    """The thresholds that a rule gives for norms, one after the other."""
    return [
        float(rule(torch.tensor(norm, dtype=torch.float64), step))
        for step, norm in enumerate(norms)
    ]


def clipper_of(rule, **options) -> tuple[GradClipper, nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(2))
    return GradClipper([("w", parameter)], rule, **options), parameter


def step(clipper: GradClipper, parameter: nn.Parameter, norm: float):
    parameter.grad = torch.tensor([0.6 * norm, 0.8 * norm])
    return clipper.clip_()


RULES = pytest.mark.parametrize(
    "rule",
    [
        AutoClip(50, window=3),
        ZClip(warmup_steps=2),
        RunningMean(1.5, warmup_steps=2, max_norm=4.0),
        RunningMean(1.5, skip=True),
    ],
    ids=repr,
)
NORMS = [1.0, 3.0, 2.0, 30.0, 2.5, 1.0, 9.0]


def test_autoclip_by_hand():
    # Sorted histories [4], [1 4], [1 3 4], [1 3 4 8]; the median of each, and of the last one
    # 3 + 0.5 * (4 - 3).
    assert follow(AutoClip(50), [4, 1, 3, 8]) == [4, 2.5, 3, 3.5]
    # The tenth percentile lies at place 0.1 * (t - 1): 4; 1 + 0.1 * 3; 1 + 0.2 * 2.
    assert follow(AutoClip(10), [4, 1, 3]) == pytest.approx([4, 1.3, 1.4])


@pytest.mark.parametrize("percentile", [0, 10, 33.3, 100])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_autoclip_is_numpys_percentile_of_the_window(percentile, window):
    norms = np.random.default_rng(0).lognormal(size=20)
    expected = [np.percentile(norms[max(0, t + 1 - window) : t + 1], percentile) for t in range(20)]
    assert follow(AutoClip(percentile, window), norms) == pytest.approx(expected, rel=1e-14)


def test_zclip_by_hand():
    # Warm-up: norms 2 and 4 have mean 3, variance ((2-3)**2 + (4-3)**2) / 2 = 1, s = 1.
    # 7: z = (7 - 3) / (1 + 1e-6) = 4, above 2: clipped to 3 + 2**2 / 4 * 1 = 4. Then with
    # alpha = 0.5: m = 0.5 * 3 + 0.5 * 4 = 3.5; v = 0.5 * 1 + 0.5 * (4 - 3.5)**2 = 0.625.
    # 4: z = 0.5 / 0.79, not above 2: not clipped; m = 3.75, v = 0.3125 + 0.5 * 0.0625 = 0.34375.
    rule = ZClip(alpha=0.5, z_thresh=2.0, warmup_steps=2)
    assert follow(rule, [2, 4]) == [math.inf, math.inf]
    assert {k: float(v) for k, v in rule.state_dict().items()} == {"mean": 3, "var": 1, "count": 2}
    assert follow(rule, [7]) == pytest.approx([4], rel=2e-6)
    assert float(rule.state_dict()["mean"]) == pytest.approx(3.5, rel=2e-6)
    assert float(rule.state_dict()["var"]) == pytest.approx(0.625, rel=2e-6)
    assert follow(rule, [4]) == [math.inf]
    assert float(rule.state_dict()["mean"]) == pytest.approx(3.75, rel=2e-6)
    assert float(rule.state_dict()["var"]) == pytest.approx(0.34375, rel=2e-6)


def test_zclip_clips_a_larger_spike_further():
    rules = [ZClip(warmup_steps=2) for _ in range(2)]
    limits = [follow(rule, [1, 2, spike])[-1] for rule, spike in zip(rules, (5, 50), strict=True)]
    assert 1.5 < limits[1] < limits[0] < 5


def test_zclips_first_statistics_are_those_of_the_warmup():
    norms = np.random.default_rng(1).lognormal(size=25)
    rule = ZClip()
    assert set(follow(rule, norms)) == {math.inf}
    assert float(rule.state_dict()["mean"]) == pytest.approx(norms.mean(), rel=1e-14)
    assert float(rule.state_dict()["var"]) == pytest.approx(norms.var(), rel=1e-13)


def test_running_mean_by_hand():
    # m = 1. Twice that: 3 is clipped to 2, m = 0.5 * 1 + 0.5 * 2 = 1.5; 9 is clipped to 3,
    # m = 2.25; 1 is below 4.5, m = 1.625; the last threshold is 3.25.
    assert follow(RunningMean(2.0, beta=0.5), [1, 3, 9, 1, 1]) == [math.inf, 2, 3, 4.5, 3.25]
    # The mean of 1, 2 and 6 is 3.
    assert follow(RunningMean(2.0, warmup_steps=3), [1, 2, 6, 1]) == [math.inf] * 3 + [6]


def test_linear_warmup_by_hand():
    assert follow(LinearWarmup(10.0, 2.0, 4), [1] * 6) == [10, 8, 6, 4, 2, 2]


def test_a_cap_holds_in_the_warmup_and_does_not_enter_the_state():
    free, capped = RunningMean(2.0, beta=0.5), RunningMean(2.0, beta=0.5, max_norm=2.5)
    assert follow(capped, [1, 3, 9]) == [2.5, 2, 2.5]
    follow(free, [1, 3, 9])
    assert free.state_dict() == capped.state_dict()


@RULES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("when", [0, 3])
def test_what_is_not_finite_enters_no_state(rule, bad, when):
    rule, untroubled = copy.deepcopy(rule), copy.deepcopy(rule)
    with_it = follow(rule, [*NORMS[:when], bad, *NORMS[when:]])
    assert with_it[:when] + with_it[when + 1 :] == follow(untroubled, NORMS)
    assert not math.isnan(with_it[when])


class HostReads(TorchDispatchMode):
    """Refuses what would wait for a device."""

    NAMES = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_to_copy")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        moves = name != "_to_copy" or "device" in (kwargs or {})
        assert name not in self.NAMES or not moves, func
        return func(*args, **(kwargs or {}))


@RULES
def test_nothing_is_read_back_to_the_host(rule):
    rule, norm = copy.deepcopy(rule), torch.ones((), dtype=torch.float64)
    with HostReads():
        for index in range(4):
            assert rule(norm * index, index).dtype == torch.float64


@RULES
def test_state_stays_where_it_is_from_step_to_step(rule):
    rule = copy.deepcopy(rule)
    follow(rule, NORMS[:1])
    before = {name: kept.data_ptr() for name, kept in rule._state.items()}
    follow(rule, NORMS[1:])
    assert {name: kept.data_ptr() for name, kept in rule._state.items()} == before


@RULES
def test_goes_on_from_a_checkpoint(rule):
    rule = copy.deepcopy(rule)
    clipper, parameter = clipper_of(copy.deepcopy(rule))
    for norm in NORMS[:4]:
        step(clipper, parameter, norm)
    saved = io.BytesIO()
    torch.save(clipper.state_dict(), saved)
    saved.seek(0)
    other, elsewhere = clipper_of(rule)
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert (other.steps, other.skipped) == (clipper.steps, clipper.skipped)
    for norm in NORMS[4:]:
        one, two = step(clipper, parameter, norm), step(other, elsewhere, norm)
        assert one.outcome.max_norm == two.outcome.max_norm
        assert torch.equal(parameter.grad, elsewhere.grad)


def test_a_state_dict_does_not_change_with_later_steps():
    rule = RunningMean(2.0)
    follow(rule, [1.0])
    saved = rule.state_dict()
    follow(rule, [2.0])
    assert float(saved["mean"]) == 1.0


@pytest.mark.parametrize(
    ("made", "other"), [(AutoClip(window=3), AutoClip(window=4)), (ZClip(), RunningMean(2.0))]
)
def test_another_thresholds_state_is_refused(made, other):
    before = made.state_dict()
    with pytest.raises(ValueError, match="load it into a threshold made as the saved one was"):
        made.load_state_dict(other.state_dict())
    assert all(torch.equal(made.state_dict()[name], kept) for name, kept in before.items())


def test_an_adaptive_state_is_refused_by_a_fixed_max_norm():
    clipper, _ = clipper_of(1.0)
    with pytest.raises(ValueError, match="give it a threshold made as the saved one was"):
        clipper.load_state_dict(clipper_of(ZClip())[0].state_dict())
    with pytest.raises(ValueError, match="lacks consecutive_skips, max_norm"):
        clipper.load_state_dict({"steps": 1, "skipped": 0})


def test_numbers_are_loaded_as_well_as_tensors():
    rule = ZClip()
    rule.load_state_dict({"mean": 2.0, "var": 0.25, "count": 25})
    # z = (3 - 2) / 0.5 = 2 is not above 2.5; 4 has z = 4: 2 + 2.5**2 / 4 * 0.5
    assert follow(copy.deepcopy(rule), [3]) == [math.inf]
    assert follow(rule, [4]) == pytest.approx([2.78125], rel=1e-5)


def test_the_clipper_clips_to_the_threshold():
    clipper, parameter = clipper_of(RunningMean(2.0, beta=0.5))
    clipped = [step(clipper, parameter, norm).clipped_norm for norm in (1, 3, 9, 1)]
    assert clipped == pytest.approx([1, 2, 3, 1], rel=1e-5)
    assert float(parameter.grad.norm()) == pytest.approx(1)


def test_a_spike_is_skipped_where_that_is_asked_for():
    clipper, parameter = clipper_of(RunningMean(2.0, beta=0.5, skip=True))
    results = [step(clipper, parameter, norm) for norm in (1.0, 1.5, 9.0)]
    assert [result.skipped for result in results] == [False, False, True]
    assert torch.equal(parameter.grad, torch.tensor([0.6 * 9.0, 0.8 * 9.0]))
    assert (clipper.skipped, clipper.consecutive_skips) == (1, 1)
    assert results[-1].outcome.max_norm == 2.5  # m = 0.5 * 1 + 0.5 * 1.5
    assert not results[-1].clipped


def test_the_optimizer_leaves_a_skipped_step_out():
    clipper, parameter = clipper_of(RunningMean(2.0, skip=True))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for norm, moves in ((1.0, True), (9.0, False), (1.0, True)):
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([norm, 0.0])
        clipper.step(optimizer)
        assert torch.equal(parameter.detach(), before) != moves


def test_a_grad_scaler_takes_a_skipped_spike_for_an_overflow():
    clipper, parameter = clipper_of(RunningMean(2.0, skip=True))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for norm, moves in ((1.0, True), (9.0, False)):
        before = parameter.detach().clone()
        scaler.scale((parameter * torch.tensor([norm, 0.0])).sum()).backward()
        result = clipper.step(optimizer, grad_scaler=scaler)
        scaler.update()
        optimizer.zero_grad()
        assert result.outcome.total_norm == pytest.approx(norm)
        assert torch.equal(parameter.detach(), before) != moves
    assert scaler.get_scale() == 4.0


def test_a_nan_is_propagated_while_spikes_are_skipped():
    clipper, parameter = clipper_of(RunningMean(2.0, skip=True))
    step(clipper, parameter, 1.0)
    result = step(clipper, parameter, math.nan)
    assert not result.skipped
    assert parameter.grad.isnan().all()
    clipper, parameter = clipper_of(RunningMean(2.0, skip=True), nonfinite="skip")
    assert step(clipper, parameter, math.nan).nonfinite_parameters == ("w",)
    assert clipper.skipped == 1


def test_spikes_in_a_row_raise():
    clipper, parameter = clipper_of(RunningMean(2.0, skip=True), max_consecutive_skips=2)
    step(clipper, parameter, 1.0)
    step(clipper, parameter, 100.0)
    with pytest.raises(RuntimeError, match="2 steps in a row were skipped"):
        step(clipper, parameter, 100.0)


def test_any_callable_is_a_rule():
    told = []

    def half(total_norm, step):
        told.append((float(total_norm), step))
        return total_norm / 2 if step else 3

    clipper, parameter = clipper_of(half)
    assert [step(clipper, parameter, 8.0).outcome.max_norm for _ in range(2)] == [3, 4]
    assert [norm for norm, _ in told] == pytest.approx([8.0, 8.0])
    assert [number for _, number in told] == [0, 1]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (-1.0, "returned must be >= 0, got -1.0"),
        (math.nan, "returned must be >= 0, got nan"),
        ("much", "must be a number >= 0, got 'much'"),
        (torch.ones(2), r"shape \(2,\); return one number"),
    ],
)
def test_a_wrong_threshold_is_refused_and_nothing_is_touched(returned, said):
    clipper, parameter = clipper_of(lambda total_norm, step: returned)
    with pytest.raises(ValueError, match=said):
        step(clipper, parameter, 5.0)
    assert torch.equal(parameter.grad, torch.tensor([3.0, 4.0]))


def test_a_number_made_of_a_nan_norm_is_the_norms_fault():
    clipper, parameter = clipper_of(lambda total_norm, step: 2 * float(total_norm))
    assert not step(clipper, parameter, math.nan).finite


def test_groups_that_follow_a_rule_are_scaled_alike_by_the_total_norm():
    one, two, own = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    groups = [{"params": [one]}, {"params": [two]}, {"params": [own], "max_norm": 6.0}]
    clipper = GradClipper(groups, lambda total_norm, step: 6.5)
    for parameter, grad in ((one, 3.0), (two, 4.0), (own, 12.0)):
        parameter.grad = torch.tensor([grad])
    result = clipper.clip_()
    # The total norm is 13: the first two are halved, the last is clipped to its own 6.
    assert [float(p.grad) for p in (one, two, own)] == pytest.approx([1.5, 2, 6], rel=1e-5)
    assert result.outcome.max_norms == (6.5, 6.5, 6.0)


def test_a_group_has_no_rule_of_its_own():
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "max_norm": ZClip()}]
    with pytest.raises(ValueError, match=r"max_norm must be a number >= 0, got ZClip"):
        GradClipper(groups, 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AutoClip(101),
        lambda: AutoClip(window=0),
        lambda: ZClip(alpha=1.5),
        lambda: ZClip(z_thresh=math.nan),
        lambda: ZClip(warmup_steps=0),
        lambda: RunningMean(-1.0),
        lambda: RunningMean(2.0, beta=-0.1),
        lambda: RunningMean(2.0, max_norm=-1.0),
        lambda: LinearWarmup(-1.0, 1.0, 3),
        lambda: LinearWarmup(1.0, 1.0, 0),
    ],
)
def test_wrong_arguments_are_refused(make):
    with pytest.raises(ValueError, match=r"must be"):
        make()


def test_what_they_share_is_no_threshold_by_itself():
    with pytest.raises(TypeError, match="abstract"):
        Threshold()


def test_the_default_dtype_changes_nothing():
    torch.set_default_dtype(torch.float16)
    try:
        with warnings.catch_warnings():
            low = [follow(rule, NORMS) for rule in (AutoClip(33), ZClip(warmup_steps=2))]
    finally:
        torch.set_default_dtype(torch.float32)
    assert low == [follow(rule, NORMS) for rule in (AutoClip(33), ZClip(warmup_steps=2))]
