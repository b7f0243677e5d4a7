"""One step in plain numbers: what follows from the norms and the coefficients."""

import math

import pytest

from shardclip.record.outcome import Outcome, combine

from .runs import outcome


@pytest.mark.parametrize(
    ("norm", "coef", "clipped", "after"),
    [
        (4.0, 0.25, True, 1.0),
        (0.5, 1.0, False, 0.5),
        (math.inf, 0.0, False, math.nan),  # as torch propagates it: inf * 0
        (math.nan, math.nan, False, math.nan),
    ],
)
def test_clipped_and_the_norm_after(norm, coef, clipped, after):
    step = Outcome(norm, (norm,), (coef,), (1.0,))
    assert step.clipped is clipped
    assert step.clipped_norm == pytest.approx(after, nan_ok=True)
    assert step.as_dict()["clipped"] == float(clipped)


def test_a_skipped_step_is_not_clipped_and_keeps_its_norm():
    step = Outcome(math.inf, (math.inf,), (1.0,), (1.0,), skipped=True)
    assert not step.clipped
    assert math.isinf(step.clipped_norm)


def test_one_coefficient_that_is_nan_is_the_smallest():
    assert math.isnan(Outcome(1.0, (1.0, 1.0), (0.5, math.nan), (1.0, 1.0)).clip_coef)
    assert Outcome(1.0, (1.0, 1.0), (0.5, 0.25), (1.0, 1.0)).clip_coef == 0.25


def test_the_threshold_is_one_only_if_all_groups_share_it():
    assert outcome(max_norm=2.0).max_norm == 2.0
    assert math.isnan(Outcome(1.0, (1.0, 1.0), (1.0, 1.0), (1.0, 2.0)).max_norm)


@pytest.mark.parametrize(
    ("norms", "p", "whole"),
    [
        ([3.0, 4.0], 2.0, 5.0),
        ([3.0, 4.0], 1.0, 7.0),
        ([3.0, 4.0], 0.0, 7.0),
        ([3.0, 4.0], math.inf, 4.0),
        ([3e200, 4e200], 2.0, 5e200),
        ([3e-200, 4e-200], 2.0, 5e-200),
        ([0.0, 0.0], 2.0, 0.0),
        ([], 2.0, 0.0),
        ([1.0, 1.0, 1.0], 1e-3, math.inf),
        ([1.0, math.nan], 2.0, math.nan),
    ],
)
def test_norms_of_parts_combine(norms, p, whole):
    assert combine(norms, p) == pytest.approx(whole, rel=1e-14, nan_ok=True)
