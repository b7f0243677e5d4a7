"""Tables of 80 columns, for a terminal and a log file."""

import textwrap
from collections.abc import Sequence

from benchmarks.contenders import CLIPPED, FIRST, USUAL
from benchmarks.measuring import ours
from benchmarks.records import Row

WIDTH = 80
_NAME = 25
_DOES = ("clip", "norm", "step")  # in this order


def of_cases(made: Sequence[Row]) -> str:
    """Set the rows of each case in two tables: times, and counts."""
    names = list(dict.fromkeys(row["case"] for row in made))
    blocks = [_case([row for row in made if row["case"] == name]) for name in names]
    return "\n\n".join(blocks)


def _case(made: Sequence[Row]) -> str:
    measured = [row for row in made if row["kind"] == "clip"]
    if not measured:
        return "\n".join([f"{made[0]['case']}:", *absences(made)])
    head = measured[0]
    text = f"{head['case']}: {head['text']}, {head['bytes'] / 2**20:.3g} MiB a rank"
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="  ")
    lines += [*_times(measured), "", *_counts(measured)]
    return "\n".join(lines + absences(made))


def _rows_by_contender(made: Sequence[Row]) -> dict[str, dict[str, Row]]:
    held: dict[str, dict[str, Row]] = {}
    for row in sorted(made, key=lambda row: (_DOES.index(row["does"]), ours(row))):
        held.setdefault(row["contender"], {})[row["step"]] = row
    return held


def _times(made: Sequence[Row]) -> list[str]:
    """Tell the median time, its ratio to the baseline, and the ratio's quartiles."""
    head = f"{'ms':>8}{'ratio':>6} {'quartiles':<9}"
    lines = [
        f"{'':<{_NAME}}{'usual step':^24}{'clipped step':^24}{'first':>7}",
        f"{'':<{_NAME}}{head}{head}{'ratio':>7}",
        "-" * WIDTH,
    ]
    for name, steps in _rows_by_contender(made).items():
        cells = "".join(_time(name, steps.get(step)) for step in (USUAL, CLIPPED))
        lines.append(f"{name:<{_NAME}}{cells}{_ratio(steps.get(FIRST)):>7}".rstrip())
        lines += _hidden(steps.get(USUAL))
    return lines


def _time(name: str, row: Row | None) -> str:
    if row is None:
        return f"{'-':>8}{'':16}"
    low, middle, high = row["ratio"] or (None, None, None)
    spread = "" if low is None or name == row["baseline"] else f"{_short(low)}-{_short(high)}"
    return f"{row['milliseconds'][1]:>8.2f}{_short(middle):>6} {spread:<9}"


def _short(ratio: float | None) -> str:
    """Write a ratio in four characters."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"


def _ratio(row: Row | None) -> str:
    if row is None or not row["ratio"]:
        return "-"
    ratio = row["ratio"][1]
    return f"{ratio:.3f}" if ratio < 0.1 else _short(ratio)


def _hidden(row: Row | None) -> list[str]:
    """Tell what stands in the backward pass, where anything does."""
    if row is None or row["contender"].find("overlap") < 0:
        return []
    return [f"{'  in the backward pass':<{_NAME}}{row['hidden_milliseconds'][1]:>8.2f}"]


def _counts(made: Sequence[Row]) -> list[str]:
    """Tell what a call does; bytes in units of those of this rank's gradients."""
    lines = [
        f"{'':<{_NAME}}{'all-':>7}{'bytes read':>17}{'bytes written':>18}{'host':>6}",
        f"{'':<{_NAME}}{'reduces':>7}{'usual':>9}{'clipped':>8}{'usual':>9}{'clipped':>9}"
        f"{'syncs':>6}{'error':>7}",
        "-" * WIDTH,
    ]
    for name, steps in _rows_by_contender(made).items():
        usual, clipped = steps.get(USUAL), steps.get(CLIPPED)
        if usual is None:
            continue
        cells = f"{_share(usual, 'read'):>9}{_share(clipped, 'read'):>8}"
        cells += f"{_share(usual, 'written'):>9}{_share(clipped, 'written'):>9}"
        syncs = "-" if usual["host_syncs"] is None else usual["host_syncs"]
        lines.append(
            f"{name:<{_NAME}}{usual['counts']['all_reduces']:>7}{cells}"
            f"{syncs:>6}{usual['norm_error']:>7.0e}"
        )
    return lines


def _share(row: Row | None, what: str) -> str:
    if row is None:
        return "-"
    share = row["counts"][what] / max(1, row["bytes"])
    return f"{share:.3f}" if share < 100 else f"{share:.3g}"


def absences(made: Sequence[Row]) -> list[str]:
    """Say who was left out, and why."""
    lines = []
    for row in made:
        if row["kind"] == "absent":
            text = f"{row['contender']} left out: {row['reason']}"
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ")
    return lines
