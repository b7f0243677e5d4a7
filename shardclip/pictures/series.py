"""What there is to see in a run, as plain lists: spikes, shares, a heat map's cells."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shardclip.record import Outcome, Run, combine

USUAL, FACTOR, APART = 50, 3.0, 10
"""A spike's norm is ``FACTOR`` times the median of the ``USUAL`` steps before it. A spell of such
steps ends after ``APART`` others."""


@dataclass(frozen=True)
class Spike:
    """A step whose norm stands out.

    Attributes:
        step: Its number.
        norm: Its norm; NaN or inf where that is what stands out.
        times: How many times the usual norm; inf where the norm is not finite.
        module: The parameter or module that contributed most; "" if that is not known.
        share: Its share of the sum of |x|^p, 0 to 1; NaN if that is not known.
    """

    step: int
    norm: float
    times: float
    module: str = ""
    share: float = math.nan


def spikes(steps: Sequence[Outcome]) -> list[Spike]:
    """Find the steps that stand out, in their order; each spell of them once, by its largest."""
    found: list[Spike] = []
    last = -APART  # the last step of the spell
    for step, usual in zip(steps, usual_norms(steps), strict=True):
        times = step.total_norm / usual if step.finite and usual > 0 else math.inf
        if step.finite and not (usual > 0 and times > FACTOR):
            continue
        spike = Spike(step.step, step.total_norm, times, *largest_part(step))
        within, last = step.step - last < APART, step.step
        if found and within:
            if spike.times > found[-1].times:
                found[-1] = spike
        else:
            found.append(spike)
    return found


def usual_norms(steps: Sequence[Outcome]) -> list[float]:
    """Return for each step the median norm of those before it; NaN for the first ten."""
    window: list[float] = []  # the last finite norms, and the same in order of size
    ordered: list[float] = []
    out = []
    for step in steps:
        out.append(ordered[len(ordered) // 2] if len(ordered) >= 10 else math.nan)
        if step.finite:
            window.append(step.total_norm)
            bisect.insort(ordered, step.total_norm)
            if len(ordered) > USUAL:
                ordered.pop(bisect.bisect_left(ordered, window[-USUAL - 1]))
    return out


def largest_part(step: Outcome) -> tuple[str, float]:
    """Return the module that contributed most, and its share of the sum of |x|^p.

    Where the norm is not finite: the modules that are not, of which no share can be told.
    """
    if not step.norms:
        return "", math.nan
    first, *others = [n for n, norm in step.norms.items() if not math.isfinite(norm)] or [""]
    if first:
        return f"{first} and {len(others)} more" if others else first, math.nan
    name = max(step.norms, key=lambda key: step.norms[key])
    norm, p = step.norms[name], step.norm_type
    if not step.finite or math.isinf(p) or norm == 0:
        return name, math.nan
    whole = combine(list(step.norms.values()), p)
    return name, norm / whole if p == 0 else (norm / whole) ** p


def by_group(run: Run) -> list[Run]:
    """Return a run for each param group, with its own norms and thresholds.

    None where there is one group, or where all are scaled alike by the total norm.
    """
    groups = max(len(step.group_norms) for step in run.steps)
    alike = all(len({*step.group_coefs}) == 1 == len({*step.max_norms}) for step in run.steps)
    if groups == 1 or alike:
        return []
    return [
        Run(f"group {group}", [_of_group(step, group) for step in run.steps if _has(step, group)])
        for group in range(groups)
    ]


def _has(step: Outcome, group: int) -> bool:
    return group < len(step.group_norms)


def _of_group(step: Outcome, group: int) -> Outcome:
    norm, coef, limit = step.group_norms[group], step.group_coefs[group], step.max_norms[group]
    return Outcome(
        norm,
        (norm,),
        (coef,),
        (limit,),
        norm_type=step.norm_type,
        skipped=step.skipped,
        step=step.step,
        time=step.time,
    )


def alone(values: Sequence[float]) -> list[int]:
    """Return the places of the numbers that a line leaves out: those with none beside them."""
    padded = [math.nan, *values, math.nan]
    return [
        place
        for place, value in enumerate(values)
        if not math.isnan(value) and math.isnan(padded[place]) and math.isnan(padded[place + 2])
    ]


def window_of(count: int) -> int:
    """Return over how many steps a share is averaged in a picture of ``count`` steps."""
    return max(10, min(100, count // 20), count // 100)


def running_share(flags: Sequence[bool], window: int) -> list[float]:
    """Return the share of true flags, in percent, among each and the ``window - 1`` before it."""
    shares, inside = [], 0
    for index, flag in enumerate(flags):
        inside += flag
        inside -= flags[index - window] if index >= window else False
        shares.append(100 * inside / min(window, index + 1))
    return shares


def binned(count: int, most: int) -> list[range]:
    """Cut ``count`` places into at most ``most`` neighbouring bins."""
    bins = min(count, most)
    edges = [index * count // bins for index in range(bins + 1)] if bins else []
    return [range(start, stop) for start, stop in pairwise(edges)]


@dataclass(frozen=True)
class Cells:
    """A heat map: a row for each module, a column for each bin of steps.

    Attributes:
        rows: The modules' names.
        first: The first column's step.
        last: The last column's step.
        norms: Row by row, the largest norm in each column; NaN where there is none.
    """

    rows: list[str]
    first: int
    last: int
    norms: list[list[float]]

    def coarser(self, most: int) -> Cells:
        """Return at most so many columns, so that a narrow picture drops none."""
        bins = binned(len(self.norms[0]), most)
        norms = [[_largest(row[p.start : p.stop]) for p in bins] for row in self.norms]
        return replace(self, norms=norms)


def cells(steps: Sequence[Outcome], most_rows: int, most_columns: int) -> Cells | None:
    """Lay the norms by name out as a heat map; None where the run has none.

    Args:
        steps: The run.
        most_rows: Where there are more names, those with a common beginning are combined, to the
            norm of them all.
        most_columns: Where there are more steps, neighbours share a column, with their largest.
    """
    named = [step for step in steps if step.norms]
    names = list(dict.fromkeys(name for step in named for name in step.norms))
    if not names:
        return None
    row_of = folded(names, most_rows)
    rows = list(dict.fromkeys(row_of.values()))
    columns = []
    for places in binned(len(named), most_columns):
        parts = [_by_row(named[place], row_of) for place in places]
        columns.append([_largest(part.get(row, math.nan) for part in parts) for row in rows])
    norms = [list(row) for row in zip(*columns, strict=True)]
    return Cells(rows, named[0].step, named[-1].step, norms)


def folded(names: Sequence[str], most: int) -> dict[str, str]:
    """Map each name to its row, of which there are at most ``most``.

    A row is what names have in common at their beginning, as long as that may be; where a level
    of names has too many, and the one above so few that nothing is told apart, neighbours share.
    """
    deepest = max(name.count(".") for name in names) + 1
    levels = [list(dict.fromkeys(_start(name, d + 1) for name in names)) for d in range(deepest)]
    fits = [depth for depth, rows in enumerate(levels) if len(rows) <= most]
    depth = max(fits, default=-1)
    if depth + 1 < deepest and (depth < 0 or len(levels[depth]) < most / 3):
        depth += 1
    label = {}
    for places in binned(len(levels[depth]), most):
        shared = levels[depth][places.start : places.stop]
        label.update(dict.fromkeys(shared, _span(shared[0], shared[-1])))
    return {name: label[_start(name, depth + 1)] for name in names}


def _span(first: str, last: str) -> str:
    """Name a row that neighbours share: ``layers.4 to 7``."""
    if first == last:
        return first
    parent, _, own = last.rpartition(".")
    return f"{first} to {own if parent == first.rpartition('.')[0] else last}"


def _start(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])


def _by_row(step: Outcome, row_of: dict[str, str]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for name, norm in step.norms.items():
        parts.setdefault(row_of[name], []).append(norm)
    return {
        row: norms[0] if len(norms) == 1 else combine(norms, step.norm_type)
        for row, norms in parts.items()
    }


def _largest(norms: Iterable[float]) -> float:
    finite = [norm for norm in norms if math.isfinite(norm)]
    return max(finite, default=math.nan)


def median(values: Iterable[float]) -> float:
    """Return the median of the finite values; NaN without any."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan
