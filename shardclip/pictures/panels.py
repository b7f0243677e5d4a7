"""The panels of a picture, drawn with matplotlib: norms, share clipped, a heat map of modules."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shardclip import extras
from shardclip.record import Outcome, Run

from .series import Cells, Spike, alone, binned, by_group, median, running_share, window_of

try:
    import matplotlib as mpl
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(f"matplotlib is not installed: {extras.command('plot')}") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEFORE, AFTER, LIMIT, SPIKE, SKIPPED = "#5b9bd5", "#0b2545", "#e08214", "#c1121f", "#7b3294"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "text.parse_math": False,  # names are no formulas
    "svg.fonttype": "none",  # text stays text: smaller, and found by a search
}
POINTS = 1200
"""A longer run is drawn as a band from the smallest to the largest of neighbouring steps."""
ROWS, COLUMNS = 24, 500
"""Of a heat map; more columns than pixels would be dropped, and spikes with them."""
NARROW = 6.0
"""A narrower figure, in inches, has its legend in two rows."""
NAMED = 8
"""Spikes that are numbered and named."""


def style() -> AbstractContextManager[None]:
    """Return a context in which figures look alike."""
    return mpl.rc_context(STYLE)


def blank(width: float, height: float) -> Figure:
    """Return a figure without panels.

    Args:
        width: In inches.
        height: In inches.
    """
    return Figure(figsize=(width, height), layout="constrained")


def svg(figure: Figure, name: str) -> str:
    """Return a figure as an ``<svg>`` element.

    Args:
        figure: What.
        name: One that no other picture of the page has, as its inner names rest on it.
    """
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", dpi=150, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    # Groups have names that nothing refers to, and that another picture has too.
    return re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])


def scale_of(runs: Sequence[Run]) -> tuple[float, float]:
    """Return the limits of a log axis for the norms of all runs, so that they can be compared.

    With room above for the spikes' numbers; (0, 0) if there is nothing that a log axis can show.
    """
    shown = (
        norm
        for run in runs
        for step in run.steps
        for norm in (step.total_norm, step.clipped_norm, step.max_norm)
        if math.isfinite(norm) and norm > 0
    )
    positive = list(shown)
    if not positive:
        return 0.0, 0.0
    low, high = min(positive), max(positive)
    return low / 1.3, high * max(1.5, (high / low) ** 0.18)


def draw_norms(
    axes: Axes,
    run: Run,
    marked: Sequence[Spike],
    scale: tuple[float, float],
    found: Sequence[Spike] = (),
) -> None:
    """Draw the norm before and after, the threshold, and spikes, on a log axis.

    Args:
        axes: Where.
        run: What.
        marked: The spikes that get a number.
        scale: As ``scale_of`` has it.
        found: All spikes.
    """
    steps = run.steps
    _line(axes, steps, lambda step: step.total_norm, BEFORE, "before clipping", 1.1)
    if any(step.clipped for step in steps):
        _line(axes, steps, lambda step: step.clipped_norm, AFTER, "after", 1.3)
    limits = [step.max_norm for step in steps]
    if any(map(math.isfinite, limits)) and not by_group(run):  # a group's is not the total's
        known = [limit if math.isfinite(limit) else math.nan for limit in limits]
        same = len(set(known)) == 1
        numbers = [step.step for step in steps]
        label = f"max_norm {limits[0]:g}" if same else "max_norm"
        axes.plot(numbers, known, "--", color=LIMIT, linewidth=1.3, label=label)
        _dots(axes, numbers, known, LIMIT)
    if scale[0] > 0:
        axes.set_yscale("log", subs=[2, 5])
        axes.set_ylim(scale)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}" if scale[1] / scale[0] < 1000 else "")
    _mark(axes, marked, [spike for spike in found if spike not in marked])
    axes.set_ylabel("gradient norm")
    axes.set_xlabel("step")
    _finish(axes, steps)


def _mark(axes: Axes, marked: Sequence[Spike], others: Sequence[Spike]) -> None:
    """Number spikes, mark the others; what is not finite has its place at the top."""
    top = axes.transLimits.inverted().transform((0, 0.9))[1]
    top = axes.yaxis.get_transform().inverted().transform(top)
    for label, spike in enumerate([*marked, *others], start=1):
        finite, numbered = math.isfinite(spike.norm), label <= len(marked)
        place = spike.norm if finite else float(top)
        size = 5 if numbered else 3
        axes.plot([spike.step], [place], "v" if finite else "X", color=SPIKE, markersize=size)
        if numbered:
            _label(axes, label, spike.step, place, 5)
    if marked:
        axes.plot([], [], "v", color=SPIKE, markersize=5, label="spike")
    if any(not math.isfinite(spike.norm) for spike in marked):
        axes.plot([], [], "X", color=SPIKE, markersize=5, label="NaN or inf")


def _label(axes: Axes, label: int, step: int, place: float, above: float) -> None:
    axes.annotate(
        str(label),
        (step, place),
        xytext=(0, above),
        textcoords="offset points",
        ha="center",
        va="bottom",
        color=SPIKE,
        fontsize=8,
        fontweight="bold",
        annotation_clip=False,
    )


def draw_share(axes: Axes, run: Run) -> None:
    """Draw the share of clipped, and if there are any of skipped, steps in a running window.

    Args:
        axes: Where.
        run: What.
    """
    steps = run.steps
    window = window_of(len(steps))
    numbers = [step.step for step in steps]
    clipped = running_share([step.clipped for step in steps], window)
    axes.fill_between(numbers, clipped, color=BEFORE, alpha=0.35, linewidth=0)
    axes.plot(numbers, clipped, color=AFTER, linewidth=1.1, label="clipped")
    _dots(axes, numbers, clipped, AFTER)
    if any(step.skipped for step in steps):
        skipped = running_share([step.skipped for step in steps], window)
        axes.plot(numbers, skipped, color=SKIPPED, linewidth=1.3, label="skipped")
        _dots(axes, numbers, skipped, SKIPPED)
    axes.set_ylim(0, 103)
    axes.set_ylabel(f"% of the last\n{window} steps")
    axes.set_xlabel("step")
    _finish(axes, steps)


def draw_map(axes: Axes, found: Cells, marked: Sequence[Spike], width: int = 30) -> None:
    """Draw the norms by name as a heat map over steps.

    Args:
        axes: Where.
        found: What.
        marked: The spikes that get a number.
        width: How many letters of a name are shown.
    """
    positive = [norm for row in found.norms for norm in row if norm > 0]
    scale = LogNorm(min(positive, default=1.0), max(positive, default=1.0) * (1 + 1e-9))
    colours = mpl.colormaps["viridis"].with_extremes(bad="#d9d9d9")
    values = [[norm if norm > 0 else math.nan for norm in row] for row in found.norms]
    image = axes.imshow(
        values,
        aspect="auto",
        interpolation="nearest",
        norm=scale,
        cmap=colours,
        extent=(found.first - 0.5, found.last + 0.5, len(found.rows) - 0.5, -0.5),
    )
    names = [shortened(name, width) for name in found.rows]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.grid(visible=False)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(_whole_numbers())
    for label, spike in enumerate(marked, start=1):
        _label(axes, label, spike.step, -0.5, 1)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, fraction=0.05, aspect=18)
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.yaxis.set_minor_formatter("")
    bar.set_label("gradient norm")


def number(value: float) -> str:
    """Write a norm with three digits."""
    return "NaN" if math.isnan(value) else f"{value:.3g}"


def multiple(value: float) -> str:
    """Write how many times something is something else, with two digits."""
    return f"{value:.2g}" if value < 99.5 else f"{float(f'{value:.2g}'):,.0f}"


def worst(found: Sequence[Spike], most: int = NAMED) -> list[Spike]:
    """Return the largest spikes, in the order of their steps."""
    largest = sorted(found, key=lambda spike: spike.times, reverse=True)[:most]
    return sorted(largest, key=lambda spike: spike.step)


def _line(
    axes: Axes,
    steps: Sequence[Outcome],
    value: Callable[[Outcome], float],
    colour: str,
    label: str,
    width: float,
) -> None:
    """Draw every step, or of a long run the median and the range of neighbours."""
    values = [value(step) for step in steps]
    values = [one if math.isfinite(one) and one > 0 else math.nan for one in values]
    numbers = [step.step for step in steps]
    if len(steps) > POINTS:
        bins = binned(len(steps), POINTS // 2)
        parts = [[values[at] for at in places if not math.isnan(values[at])] for places in bins]
        numbers = [numbers[places.start] for places in bins]
        low = [min(part, default=math.nan) for part in parts]
        high = [max(part, default=math.nan) for part in parts]
        axes.fill_between(numbers, low, high, color=colour, alpha=0.4, linewidth=0.5)
        values = [median(part) for part in parts]
    axes.plot(numbers, values, color=colour, linewidth=width, label=label)
    _dots(axes, numbers, values, colour)


def _whole_numbers() -> MaxNLocator:
    return MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10], min_n_ticks=1)


def _dots(axes: Axes, numbers: Sequence[int], values: Sequence[float], colour: str) -> None:
    """Show the points that have no neighbour to draw a line to."""
    places = alone(values)
    if places:
        dots = [numbers[place] for place in places], [values[place] for place in places]
        axes.plot(*dots, "o", color=colour, markersize=4, clip_on=False)


def _finish(axes: Axes, steps: Sequence[Outcome]) -> None:
    axes.set_xlim(steps[0].step - 0.5, steps[-1].step + 0.5)
    axes.xaxis.set_major_locator(_whole_numbers())
    narrow = axes.figure.bbox.width / axes.figure.dpi < NARROW
    axes.legend(  # above the panel, where no curve can run into it
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=3 if narrow else 5,
        borderaxespad=0.1,
        handlelength=1.2,
        columnspacing=1.2,
        fontsize=8 if narrow else None,
    )


def shortened(name: str, width: int, *, keep_end: bool = True) -> str:
    """Keep a name's end, which tells modules apart, or its beginning."""
    if len(name) <= width:
        return name
    return "…" + name[-(width - 1) :] if keep_end else name[: width - 1] + "…"
