"""What there is to see in a run, and that it gets drawn."""

import math
import xml.etree.ElementTree as ET

import matplotlib.image
import pytest

from shardclip.pictures import panels, plot, report, series
from shardclip.record.outcome import Outcome, combine
from shardclip.record.run_file import Run, RunFileError

from .runs import MODULES, outcome, steps


def test_a_spike_names_the_module_that_contributed_most():
    found = series.spikes(steps(200, spikes=(60, 120), nonfinite=(150,)))
    assert [(spike.step, spike.module) for spike in found] == [
        (60, "layers.2.mlp"),
        (120, "layers.2.mlp"),
        (150, "layers.1.attn"),
    ]
    assert found[0].times == pytest.approx(100 / math.sqrt(len(MODULES)), rel=0.3)
    assert 0.99 < found[0].share < 1
    assert math.isinf(found[2].times)
    assert math.isnan(found[2].share)


def test_a_spell_of_spikes_is_named_once_by_its_largest():
    norms = [1.0] * 30 + [5.0, 9.0, 6.0] + [1.0] * 8 + [4.0] * 15 + [1.0] * 30
    found = series.spikes([outcome(step, norm) for step, norm in enumerate(norms, start=1)])
    assert [(spike.step, spike.norm, spike.module) for spike in found] == [(32, 9.0, "")]


def test_the_beginning_is_no_spike():
    norms = [100.0, 50.0, 20.0] + [1.0] * 40
    assert series.spikes([outcome(step, norm) for step, norm in enumerate(norms, start=1)]) == []


def test_usual_norms_are_the_median_of_the_steps_before():
    norms = [float(step % 7) + step / 10 for step in range(200)]
    found = series.usual_norms([outcome(step, norm) for step, norm in enumerate(norms)])
    for place in (10, 49, 50, 51, 120, 199):
        before = sorted(norms[max(0, place - series.USUAL) : place])
        assert found[place] == before[len(before) // 2]
    assert all(map(math.isnan, found[:10]))


@pytest.mark.parametrize(
    ("norm_type", "share"), [(2.0, 16 / 25), (1.0, 4 / 7), (0.0, 4 / 7), (math.inf, math.nan)]
)
def test_shares_are_of_the_sum_of_powers(norm_type, share):
    step = outcome(norms={"a": 3.0, "b": 4.0}, norm_type=norm_type)
    name, found = series.largest_part(step)
    assert name == "b"
    assert found == pytest.approx(share, nan_ok=True)


def test_what_is_not_finite_is_named_and_counted():
    norms = {"a": 1.0, "b": math.nan, "c": math.inf, "d": math.nan}
    assert series.largest_part(outcome(1, math.nan, norms=norms))[0] == "b and 2 more"


@pytest.mark.parametrize(
    ("times", "said"), [(3.14, "3.1"), (42.4, "42"), (99.6, "100"), (81234.0, "81,000")]
)
def test_multiples_have_two_digits(times, said):
    assert panels.multiple(times) == said


def test_a_running_share():
    flags = [True, True, False, False, False, True]
    assert series.running_share(flags, 3) == pytest.approx([100, 100, 200 / 3, 100 / 3, 0, 100 / 3])


def test_bins_cover_everything_once():
    for count in (0, 1, 5, 7, 100):
        bins = series.binned(count, 7)
        assert [place for places in bins for place in places] == list(range(count))
        assert len(bins) == min(count, 7)


def test_rows_of_a_heat_map_are_what_names_have_in_common():
    rows = series.folded(MODULES, 8)
    assert list(dict.fromkeys(rows.values())) == [
        "embed", "layers.0", "layers.1", "layers.2", "layers.3", "head",
    ]  # fmt: skip
    assert list(series.folded(MODULES, 20).values()) == list(MODULES)


def test_neighbours_share_a_row_where_there_are_too_many():
    names = ["embed", *(f"layers.{n}" for n in range(98)), "head"]
    rows = list(dict.fromkeys(series.folded(names, 10).values()))
    assert len(rows) == 10
    assert rows[1] == "layers.9 to 18"
    assert rows[-1] == "layers.89 to head"


def test_a_heat_map_keeps_the_largest_of_a_column_and_the_norm_of_a_row():
    recorded = steps(40, spikes=(33,))
    found = series.cells(recorded, 6, 4)
    assert (found.first, found.last) == (1, 40)
    assert [len(row) for row in found.norms] == [4] * 6
    place = found.rows.index("layers.2")
    parts = [recorded[32].norms[f"layers.2.{part}"] for part in ("attn", "mlp")]
    assert found.norms[place][3] == pytest.approx(combine(parts, 2.0))
    assert found.coarser(1).norms[place] == [max(found.norms[place])]
    assert series.cells([outcome()], 6, 4) is None


def texts(figure):
    root = ET.fromstring(panels.svg(figure, "a"))
    return ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]


def test_norms_are_drawn_on_a_log_axis_with_the_threshold_and_the_spikes():
    run = Run("a", steps(200, spikes=(120,), nonfinite=(150,)))
    marked = panels.worst(series.spikes(run.steps))
    figure = panels.blank(6, 3)
    axes = figure.subplots()
    with panels.style():
        panels.draw_norms(axes, run, marked, panels.scale_of([run]))
        drawn = texts(figure)
    assert axes.get_yscale() == "log"
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert {"before clipping", "after", "max_norm 1", "spike", "NaN or inf"} <= set(lines)
    before, after = (lines[name].get_ydata() for name in ("before clipping", "after"))
    assert before[119] == pytest.approx(run.steps[119].total_norm)
    assert after[119] == pytest.approx(1.0, rel=1e-5)
    assert math.isnan(before[149])
    assert {"1", "2"} <= set(drawn)
    low, high = axes.get_ylim()
    assert low < min(before[:149]) < max(before[:149]) < high


def test_a_long_run_is_drawn_as_a_band_that_holds_every_norm():
    run = Run("a", steps(5 * panels.POINTS, spikes=(4000,)))
    figure = panels.blank(6, 3)
    axes = figure.subplots()
    panels.draw_norms(axes, run, [], panels.scale_of([run]))
    assert max(len(line.get_xdata()) for line in axes.get_lines()[:2]) <= panels.POINTS
    (band, *_) = axes.collections
    tops = band.get_paths()[0].vertices[:, 1]
    assert tops.max() == pytest.approx(max(step.total_norm for step in run.steps))


@pytest.mark.parametrize("norms", [[3.0], [1.0, 2.0, math.nan, 3.0, math.nan]])
def test_a_step_that_stands_alone_is_seen(norms):
    run = Run("a", [outcome(step, norm) for step, norm in enumerate(norms, start=1)])
    top, bottom = panels.blank(6, 6).subplots(2)
    panels.draw_norms(top, run, [], panels.scale_of([run]))
    dots = [line for line in top.get_lines() if line.get_marker() == "o"]
    assert {(int(x), float(y)) for line in dots for x, y in line.get_xydata()} >= {
        (len(norms) - 1 or 1, 3.0)
    }
    panels.draw_share(bottom, run)
    assert any(line.get_marker() == "o" for line in bottom.get_lines()) == (len(norms) == 1)
    for axes in (top, bottom):
        low, high = axes.get_xlim()
        shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert shown
        assert all(tick == round(tick) for tick in shown)


def test_spikes_beyond_those_that_are_numbered_are_marked():
    run = Run("a", steps(400, spikes=range(30, 390, 30)))
    found = series.spikes(run.steps)
    marked = panels.worst(found)
    assert len(found) > len(marked) == panels.NAMED
    axes = panels.blank(6, 3).subplots()
    panels.draw_norms(axes, run, marked, panels.scale_of([run]), found)
    marks = [line.get_xdata() for line in axes.get_lines() if line.get_marker() == "v"]
    assert sorted(x for line in marks for x in line) == [spike.step for spike in found]


def in_groups(step, *groups):
    """A step of groups, each with a norm, a coefficient and a threshold."""
    norms, coefs, limits = zip(*groups, strict=True)
    return Outcome(combine(norms, 2.0), norms, coefs, limits, step=step)


def test_each_group_has_its_own_norm_and_threshold(tmp_path):
    apart = Run("apart", [in_groups(n, (4.0, 0.25, 1.0), (3.0, 1.0, math.inf)) for n in (1, 2)])
    first, second = series.by_group(apart)
    assert (first.name, first.steps[1].total_norm, first.steps[1].clipped_norm) == ("group 0", 4, 1)
    assert (second.steps[0].max_norm, second.steps[0].clipped) == (math.inf, False)
    by_total = Run("a", [in_groups(n, (4.0, 0.4, 2.0), (3.0, 0.4, 2.0)) for n in (1, 2)])
    assert series.by_group(by_total) == []
    assert series.by_group(Run("a", steps(3))) == []
    plot.save([apart, by_total], tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert ("group 0" in drawn, "group 1" in drawn, "max_norm 1" in drawn) == (True, True, True)
    assert "Norm of group 1" in report.page([apart])


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("count", [1, 3])
def test_a_run_without_a_finite_norm_is_drawn(tmp_path, value, count):
    run = Run("a", [outcome(step, value, max_norm=math.inf) for step in range(1, count + 1)])
    plot.save([run], tmp_path / "a.png")
    assert matplotlib.image.imread(tmp_path / "a.png").std() > 0


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_runs_are_drawn_side_by_side(tmp_path, ending):
    runs = [
        Run("with a spike", steps(100, spikes=(60,), nonfinite=(80,))),
        Run("calm, and <much> longer & with another name" * 3, steps(150, level=0.2)),
        Run("no norms", [outcome(step) for step in range(1, 30)]),
    ]
    path = tmp_path / f"a.{ending}"
    plot.save(runs, path)
    assert path.stat().st_size > 10_000
    if ending == "svg":
        drawn = path.read_text()
        assert "with a spike" in drawn
        assert "most from layers.2.mlp (100 %)" in drawn
        assert "step 80: norm NaN in layers.1.attn" in drawn
        assert "no norms by module were recorded" in drawn
    if ending == "png":
        height, width, _ = matplotlib.image.imread(path).shape
        assert width > 2 * height


def test_an_unknown_kind_of_picture_is_refused(tmp_path):
    with pytest.raises(RunFileError, match=r"no such kind of picture; give one of .*png"):
        plot.save([Run("a", steps(20))], tmp_path / "a.jpegs")
