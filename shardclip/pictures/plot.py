"""Runs side by side in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from shardclip.record import Run, RunFileError

from .panels import (
    COLUMNS,
    ROWS,
    SPIKE,
    blank,
    draw_map,
    draw_norms,
    draw_share,
    multiple,
    number,
    scale_of,
    shortened,
    style,
    worst,
)
from .series import Cells, Spike, by_group, cells, spikes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save(runs: Sequence[Run], path: Path) -> None:
    """Draw runs side by side, a column for each, into one picture.

    Args:
        runs: What was recorded.
        path: The file; its ending says what kind.

    Raises:
        RunFileError: There is no such kind of picture.
        OSError: The file cannot be written.
    """
    with style():
        figure = _side_by_side(runs)
        kinds = figure.canvas.get_supported_filetypes()
        kind = path.suffix.removeprefix(".").lower()
        if kind not in kinds:
            raise RunFileError(f"{path}: no such kind of picture; give one of {', '.join(kinds)}")
        figure.savefig(path, dpi=130)


def _side_by_side(runs: Sequence[Run]) -> Figure:
    maps = [cells(run.steps, ROWS, COLUMNS) for run in runs]
    found = [spikes(run.steps) for run in runs]
    named = list(map(worst, found))
    groups = list(map(by_group, runs))
    rows = max((len(one.rows) for one in maps if one is not None), default=0)
    lines = max(map(len, named))
    heights = {"norm": 3.2, "spikes": 0.25 + 0.19 * lines if lines else 0.0}
    heights |= {f"group {g}": 1.7 for g in range(max(map(len, groups)))}
    heights["share"] = 1.5
    heights["map"] = 0.9 + 0.17 * rows if rows else 0.0
    shown = [name for name, height in heights.items() if height]
    width = 10.0 if len(runs) == 1 else 7.2 * len(runs)
    size = (width, sum(heights.values()) + 0.7)
    figure = blank(*size)
    grid = figure.subplots(
        len(shown), len(runs), squeeze=False, height_ratios=[heights[name] for name in shown]
    )
    scale = scale_of(runs)
    for column, (run, one, marked) in enumerate(zip(runs, maps, named, strict=True)):
        panels = dict(zip(shown, grid[:, column], strict=True))
        draw_norms(panels["norm"], run, marked, scale, found[column])
        panels["norm"].set_title(shortened(run.name, 70, keep_end=False), loc="left", pad=22)
        draw_share(panels["share"], run)
        if lines:
            _list_spikes(panels["spikes"], marked)
        _draw_groups([panels[name] for name in shown if name.startswith("group")], groups[column])
        if "map" in panels:
            _draw_map_or_nothing(panels["map"], one, marked)
    return figure


def _draw_groups(panels: Sequence[Axes], groups: Sequence[Run]) -> None:
    for axes, group in zip_longest(panels, groups):
        if group is None:
            axes.set_axis_off()
        else:
            draw_norms(axes, group, [], scale_of([group]))
            axes.set_title(group.name, loc="left", pad=8)


def _draw_map_or_nothing(axes: Axes, found: Cells | None, marked: Sequence[Spike]) -> None:
    if found is not None:
        draw_map(axes, found, marked)
        axes.set_title("norms by module", loc="left", pad=12)
        return
    axes.set_axis_off()
    axes.text(0.5, 0.5, "no norms by module were recorded", ha="center", color="#666666")


def _list_spikes(axes: Axes, marked: Sequence[Spike]) -> None:
    axes.set_axis_off()
    for label, spike in enumerate(marked, start=1):
        # Offsets in points, so that the lines keep their distance whatever the panel's height.
        axes.annotate(
            f"{label}   {_sentence(spike)}",
            (0.01, 1.0),
            xycoords="axes fraction",
            xytext=(0, -13.5 * label + 6),
            textcoords="offset points",
            va="center",
            color=SPIKE,
            fontsize=8.5,
        )


def _sentence(spike: Spike) -> str:
    """Say what a spike is."""
    if not math.isfinite(spike.norm):
        where = f" in {spike.module}" if spike.module else ""
        return f"step {spike.step}: norm {number(spike.norm)}{where}"
    said = f"step {spike.step}: norm {spike.norm:.3g}, {multiple(spike.times)} times the usual"
    if not spike.module:
        return said
    share = "" if math.isnan(spike.share) else f" ({100 * spike.share:.0f} %)"
    return f"{said}; most from {shortened(spike.module, 50)}{share}"
