"""A run as one HTML page that stands alone: no script, no request, readable on a phone."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from shardclip._version import __version__
from shardclip.record import Run, RunFileError

from . import suggest
from .panels import (
    COLUMNS,
    ROWS,
    blank,
    draw_map,
    draw_norms,
    draw_share,
    multiple,
    number,
    scale_of,
    style,
    svg,
    worst,
)
from .series import Cells, Spike, by_group, cells, median, spikes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A picture is made twice: text that is read on a desktop is not on a phone, and a browser that
# shows one hides the other.
WIDE, HALF, NARROW = 10.0, 6.2, 4.1  # inches
MAP_COLUMNS = {WIDE: COLUMNS, HALF: 320, NARROW: 150}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
:root {{ color-scheme: light; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: {width}; color: #1b1b1b; background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.2rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }}
h3 {{ font-size: 1rem; margin: 1.2rem 0 .2rem; }}
p {{ margin: .3rem 0; overflow-wrap: anywhere; }}
.quiet {{ color: #5a5a5a; font-size: .875rem; }}
.runs {{ display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }}
section {{ min-width: 0; }}
dl {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(7rem, 1fr)); gap: .5rem;
  margin: .8rem 0; }}
dl div {{ background: #f3f5f8; border-radius: .4rem; padding: .45rem .6rem; }}
dt {{ color: #5a5a5a; font-size: .8rem; }}
dd {{ margin: 0; font-size: 1.1rem; font-weight: 600; overflow-wrap: anywhere; }}
figure {{ margin: 0; }}
svg {{ display: block; width: 100%; height: auto; }}
.wide {{ display: none; }}
@media (min-width: 720px) {{ .wide {{ display: block; }} .narrow {{ display: none; }} }}
table {{ border-collapse: collapse; width: 100%; font-size: .875rem; }}
.short {{ max-width: 26rem; }}
th, td {{ text-align: right; padding: .25rem .4rem; border-bottom: 1px solid #e3e6ea;
  font-variant-numeric: tabular-nums; vertical-align: top; }}
th {{ white-space: nowrap; color: #5a5a5a; font-weight: 600; }}
th.name, td.name {{ width: 45%; text-align: left; overflow-wrap: anywhere; }}
td.mark {{ color: #c1121f; font-weight: 700; }}
</style>
</head>
<body>
<header><h1>{title}</h1>
<p class="quiet">Gradient norms before and after clipping, recorded by shardclip {version}.</p>
</header>
<main class="runs">
{sections}
</main>
</body>
</html>
"""


def page(runs: Sequence[Run]) -> str:
    """Return the page.

    Args:
        runs: Side by side where the window is wide enough, else one below the other.
    """
    alone = len(runs) == 1
    title = runs[0].name if alone else f"{len(runs)} runs"
    scale = scale_of(runs)
    with style():
        sections = [_section(run, place, scale, alone=alone) for place, run in enumerate(runs)]
    return _PAGE.format(
        title=html.escape(title),
        version=html.escape(__version__),
        width="66rem" if alone else "96rem",
        sections="\n".join(sections),
    )


def _section(run: Run, place: int, scale: tuple[float, float], *, alone: bool) -> str:
    found = spikes(run.steps)
    marked = worst(found)
    parts = [] if alone else [f"<h2>{html.escape(run.name)}</h2>"]
    parts += [f'<p class="quiet">{html.escape(note)}.</p>' for note in run.notes]
    if run.meta:
        meta = ", ".join(f"{key} {value}" for key, value in run.meta.items())
        parts.append(f'<p class="quiet">{html.escape(meta)}</p>')
    parts.append(_figures_of(run, len(found)))

    def picture(what: str, height: float, draw: Callable[[Axes, float], None]) -> str:
        return _picture(f"{what}, {run.name}", f"{what}-{place}", height, draw, alone=alone)

    parts.append("<h3>Norm</h3>")
    parts.append(picture("norm", 3.4, lambda axes, _: draw_norms(axes, run, marked, scale, found)))
    parts.append(_spike_table(marked, len(found)))
    for group, one in enumerate(by_group(run)):
        parts.append(f"<h3>Norm of {one.name}</h3>")
        draw = partial(_group_norms, run=one)
        parts.append(picture(f"norm-{group}", 2.4, draw))
    parts.append("<h3>Share of steps clipped</h3>")
    parts.append(picture("share", 1.9, lambda axes, _: draw_share(axes, run)))
    parts.append("<h3>Norms by module</h3>")
    found_map = cells(run.steps, ROWS, COLUMNS)
    if found_map is None:
        hint = 'None were recorded: build the clipper with norms="module".'
        parts.append(f'<p class="quiet">{hint}</p>')
    else:
        height = 0.9 + 0.17 * len(found_map.rows)
        heat = partial(_map, found=found_map, marked=marked)
        parts.append(picture("map", height, heat))
    parts.append("<h3>Threshold</h3>")
    parts.append(_suggestions(run))
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _group_norms(axes: Axes, _: float, *, run: Run) -> None:
    draw_norms(axes, run, [], scale_of([run]))


def _map(axes: Axes, width: float, *, found: Cells, marked: Sequence[Spike]) -> None:
    letters = 16 if width == NARROW else 30
    draw_map(axes, found.coarser(MAP_COLUMNS[width]), marked, letters)


def _picture(
    what: str, name: str, height: float, draw: Callable[[Axes, float], None], *, alone: bool
) -> str:
    drawn = []
    for kind, width in (("narrow", NARROW), ("wide", WIDE if alone else HALF)):
        figure = blank(width, height)
        draw(figure.subplots(), width)
        drawn.append(f'<div class="{kind}">{svg(figure, f"{name}-{kind}")}</div>')
    label = html.escape(what, quote=True)
    return f'<figure role="img" aria-label="{label}">{"".join(drawn)}</figure>'


def _figures_of(run: Run, count: int) -> str:
    steps = run.steps
    share = sum(step.clipped for step in steps) / len(steps)
    limits = {step.max_norm for step in steps}
    finite = [step.total_norm for step in steps if step.finite]
    shown = {
        "steps": f"{len(steps):,}",
        "clipped": f"{100 * share:.3g} %",
        "max_norm": _threshold(limits),
        "median norm": number(median(finite)),
        "largest norm": number(max(finite, default=math.nan)),
        "spikes": str(count),
        "skipped": str(sum(step.skipped for step in steps)),
        "NaN or inf": str(sum(not step.finite for step in steps)),
    }
    cards = [f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in shown.items()]
    return "<dl>" + "".join(cards) + "</dl>"


def _threshold(limits: set[float]) -> str:
    known = sorted(limit for limit in limits if math.isfinite(limit))
    if not known:
        return "none" if math.inf in limits else "by group"
    if len(known) == 1:
        return f"{known[0]:g}"
    return f"{known[0]:.3g} to {known[-1]:.3g}"


def _spike_table(marked: Sequence[Spike], count: int) -> str:
    if not marked:
        return '<p class="quiet">No step stands out: none has three times the usual norm.</p>'
    rows = []
    for label, spike in enumerate(marked, start=1):
        times = multiple(spike.times) if math.isfinite(spike.times) else ""
        share = "" if math.isnan(spike.share) else f" ({100 * spike.share:.0f}&nbsp;%)"
        norm = number(spike.norm)
        rows.append(
            f'<tr><td class="mark">{label}</td><td>{spike.step}</td><td>{norm}</td>'
            f'<td>{times}</td><td class="name">{html.escape(spike.module)}{share}</td></tr>'
        )
    more = (
        f'<p class="quiet">The {len(marked)} largest of {count}.</p>' if count > len(marked) else ""
    )
    head = (
        "<tr><th></th><th>step</th><th>norm</th><th>&times; usual</th>"
        '<th class="name">most from</th></tr>'
    )
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>{more}"


def _suggestions(run: Run) -> str:
    try:
        found = suggest.suggest(run)
    except RunFileError as error:
        return f'<p class="quiet">{html.escape(str(error))}</p>'
    return "".join(_suggestion(one, alone=len(found) == 1) for one in found)


def _suggestion(found: suggest.Suggestion, *, alone: bool) -> str:
    rows = [
        f"<tr><td>{'maximum' if share == 1 else f'{100 * share:g} %'}</td><td>{norm:.4g}</td>"
        f"<td>{suggest.percent(found.above[share])}</td></tr>"
        for share, norm in found.quantiles.items()
    ]
    left_out = f" The first {found.warmup} steps, warm-up, are left out." if found.warmup else ""
    title = "" if alone else f"{html.escape(found.what)}: "
    return (
        f"<p>{title}Recommended <strong>max_norm={found.recommended:g}</strong>. "
        f"{html.escape(' '.join(suggest.reasons(found)))}{left_out}</p>"
        '<table class="short"><thead>'
        "<tr><th>quantile</th><th>norm</th><th>would clip</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
