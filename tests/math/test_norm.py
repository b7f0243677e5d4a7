import math

import pytest
import torch

from shardclip.math import norm


@pytest.mark.parametrize("wrong", [-1, -0.5, math.nan, -math.inf, "two", None])
def test_a_wrong_norm_type_is_refused(wrong):
    with pytest.raises(ValueError, match=r"norm_type must be .*got"):
        norm.check_norm_type(wrong)


@pytest.mark.parametrize("given", [0, 1, 2, 0.5, 3.5, math.inf, "inf"])
def test_any_other_norm_type_is_taken(given):
    assert norm.check_norm_type(given) == float(given)


@pytest.mark.parametrize("wrong", [-1e-9, -math.inf, math.nan, "one", None])
def test_a_wrong_max_norm_is_refused(wrong):
    with pytest.raises(ValueError, match="max_norm must be"):
        norm.check_max_norm(wrong)


def test_coefficient_is_torchs():
    total = torch.tensor([0.0, 0.5, 1.0, 5.0, math.inf], dtype=torch.float64)
    expected = [1.0, 1.0, 1 / (1 + 1e-6), 1 / (5 + 1e-6), 0.0]
    assert norm.clip_coef(total, 1.0).tolist() == expected
    assert math.isnan(norm.clip_coef(torch.tensor(math.nan), 1.0))


@pytest.mark.parametrize(
    ("total", "clip", "expected"),
    [(4.0, 2.0, 0.5), (1.0, 2.0, 1.0), (0.0, 0.0, 1.0), (3.0, 0.0, 0.0), (3.0, math.inf, 1.0)],
)
def test_tensorflows_coefficient_has_no_epsilon(total, clip, expected):
    assert norm.tf_clip_coef(torch.tensor(total, dtype=torch.float64), clip) == expected


@pytest.mark.parametrize("total", [math.inf, math.nan])
def test_tensorflows_coefficient_is_nan_for_a_norm_that_is_not_finite(total):
    assert torch.isnan(norm.tf_clip_coef(torch.tensor(total), 1.0))


@pytest.mark.parametrize(("p", "expected"), [(0, 64), (1, 64), (2, 8), (3, 4), (math.inf, 64)])
def test_finish(p, expected):
    finished = norm.finish(torch.tensor(64.0, dtype=torch.float64), p)
    torch.testing.assert_close(finished, torch.tensor(expected, dtype=torch.float64))
