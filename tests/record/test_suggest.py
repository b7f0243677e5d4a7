"""Thresholds from a record."""

import math
import random

import pytest

from shardclip.pictures.suggest import suggest, text
from shardclip.record.outcome import Outcome
from shardclip.record.run_file import Run, RunFileError

from .runs import outcome


def run_of(norms, max_norm=math.inf, name="a"):
    pairs = enumerate(norms, start=1)
    return Run(name, [outcome(step, norm, max_norm) for step, norm in pairs])


def lognormal(count, sigma, seed=0, around=2.0):
    chance = random.Random(seed)
    return [around * math.exp(chance.gauss(0, sigma)) for _ in range(count)]


def test_the_threshold_is_three_deviations_of_the_log_norm_above_the_median():
    (found,) = suggest(run_of(lognormal(20_000, 0.3)))
    assert found.recommended == pytest.approx(2.0 * math.exp(0.9), rel=0.05)
    assert found.spread == pytest.approx(math.exp(0.3), rel=0.03)
    assert found.would_clip == pytest.approx(0.00135, abs=0.001)


def test_spikes_do_not_widen_it():
    calm = lognormal(2000, 0.3)
    spiky = [norm * 100 if step % 50 == 49 else norm for step, norm in enumerate(calm)]
    (without,), (with_,) = suggest(run_of(calm)), suggest(run_of(spiky))
    assert with_.recommended == pytest.approx(without.recommended, rel=0.15)
    assert with_.would_clip == pytest.approx(0.02, abs=0.005)


def test_quantiles_and_what_each_would_have_clipped():
    (found,) = suggest(run_of([float(n) for n in range(1, 1001)]), warmup=0)
    assert found.quantiles == {
        0.5: 500, 0.75: 750, 0.9: 900, 0.95: 950, 0.99: 990, 0.999: 999, 1.0: 1000,
    }  # fmt: skip
    for share, above in found.above.items():
        assert above == pytest.approx(1 - share)


def test_warm_up_is_left_out():
    norms = [50.0 * math.exp(-step / 40) for step in range(100)] + lognormal(900, 0.1)
    (found,) = suggest(run_of(norms))
    assert found.warmup == 100
    (chosen,) = suggest(run_of(norms), warmup=10)
    assert (chosen.warmup, chosen.chosen) == (10, True)
    (none,) = suggest(run_of(lognormal(900, 0.1)))
    assert none.warmup == 0


def test_what_is_not_finite_counts_for_nothing():
    (found,) = suggest(run_of([*lognormal(100, 0.1), math.nan, math.inf]))
    assert found.nonfinite == 2
    assert found.steps == 100
    assert "left out: 2 steps with a NaN or infinite norm" in text(run_of([1.0]), found)


def test_each_group_gets_a_threshold_of_its_own():
    pairs = zip(lognormal(500, 0.2, 1, 1.0), lognormal(500, 0.2, 2, 30.0), strict=True)
    steps = [
        Outcome(math.hypot(*pair), pair, (1.0, 1.0), (1.0, 2.0), step=step)
        for step, pair in enumerate(pairs, start=1)
    ]
    first, second = suggest(Run("a", steps))
    assert (first.what, second.what) == ("group 0", "group 1")
    assert second.recommended == pytest.approx(30 * first.recommended, rel=0.15)


@pytest.mark.parametrize(
    ("norms", "message"),
    [
        ([1.0] * 10, "10 finite steps; quantiles need at least 20"),
        ([0.0] * 50, "every norm is 0"),
        ([math.nan] * 50, "0 finite steps"),
    ],
)
def test_too_little_is_said_so(norms, message):
    with pytest.raises(RunFileError, match=message):
        suggest(run_of(norms))


@pytest.mark.parametrize(
    ("norm", "threshold"), [(2.0, 2.0), (2.04, 2.1), (0.0123, 0.013), (9.96, 10.0), (3e-40, 3e-40)]
)
def test_a_threshold_is_rounded_up_so_that_what_is_usual_passes(norm, threshold):
    (found,) = suggest(run_of([norm] * 100))
    assert found.recommended == pytest.approx(threshold)
    assert found.would_clip == 0


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (run_of([2.0] * 100), "No step stood out"),
        (run_of(lognormal(200, 0.2), max_norm=0.5), "clipped in 100 % of its steps"),
        (run_of([0.997**n for n in range(400)]), "The norm drifts"),
        (run_of([1.0, 1.1, 0.9, 1.05, 30.0] * 40), "20 % of the steps, would be clipped"),
        (run_of([1.0, 1.1, 0.9, 1.05, 30.0] * 40), "That is much"),
        (run_of(lognormal(2000, 1.5, around=3e7), name="n" * 200), "recommended: max_norm="),
    ],
)
def test_the_reason_fits_the_run_and_80_columns(run, message):
    (found,) = suggest(run)
    said = text(run, found)
    assert message in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 80
