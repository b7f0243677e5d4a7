"""A row for each measurement, with all that is needed to judge it."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from benchmarks.cases import Case
from benchmarks.contenders import BASELINES
from benchmarks.records import Row

from .measurement import Measurement
from .rounds import Found, Plan

_BASE_NAMES = {contender.name for contender in BASELINES}


def rows_of(found: Found, cases: Sequence[Case], plan: Plan, described: Row) -> list[Row]:
    """Turn measurements into rows that stand alone: times, ratios, counts, case, machine.

    A ratio is the median, over the turns, of a call's time to the baseline's in the same turn: what
    slows the machine for a while slows both.
    """
    context = described | {"rounds": plan.rounds, **asdict(plan.settings)}
    by_name = {case.name: case for case in cases}
    made = []
    for one in found.measurements:
        base = _baseline(one, found.measurements)
        row = {"kind": "clip"} | asdict(one) | _statistics(one, base)
        made.append(row | _described(by_name[one.case]) | context)
    for name, reasons in found.absent.items():
        made += [
            {"kind": "absent", "case": name, "contender": contender, "reason": reason} | context
            for contender, reason in reasons.items()
        ]
    return made


def _baseline(one: Measurement, measurements: Iterable[Measurement]) -> Measurement | None:
    """Find what a user would call instead: the first baseline that does the same."""
    same = (m for m in measurements if (m.case, m.step, m.does) == (one.case, one.step, one.does))
    present = {m.contender: m for m in same}
    return next((present[c.name] for c in BASELINES if c.name in present), None)


def _statistics(one: Measurement, base: Measurement | None) -> Row:
    return {
        "milliseconds": quartiles([second * 1e3 for second in one.seconds]),
        "cpu_milliseconds": quartiles([second * 1e3 for second in one.cpu_seconds]),
        "hidden_milliseconds": quartiles([second * 1e3 for second in one.hidden]),
        "baseline": base.contender if base else None,
        "ratio": _ratios(one.seconds, base.seconds) if base else None,
        "cpu_ratio": _ratios(one.cpu_seconds, base.cpu_seconds) if base else None,
    }


def _ratios(mine: Sequence[float], base: Sequence[float]) -> list[float]:
    return quartiles([m / b for m, b in zip(mine, base, strict=True)])


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    if not values:
        return [0.0, 0.0, 0.0]
    if len(values) == 1:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def _described(case: Case) -> Row:
    return {
        "layout": case.layout,
        "shapes": case.shapes.name,
        "text": case.text,
        "dtype": case.dtype,
        "ranks": case.ranks,
        "parameters": case.shapes.count,
        "elements": case.shapes.elements,
    }


def ours(row: Row) -> bool:
    """Whether a row is of this library."""
    return row["contender"] not in _BASE_NAMES
