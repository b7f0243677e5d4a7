"""Checks and times in a table."""

import textwrap
from collections.abc import Sequence

from benchmarks.records import Row

from .timing import CASES

SPEED, USUAL = 0.85, 0.4
"""To reach on an H200: the norm's share of the best bandwidth measured, on the large tensors, and
the usual step's ratio to torch's."""


def table(made: Sequence[Row]) -> str:
    """Set the checks and the times in a table of 80 columns."""
    lines = []
    for row in made:
        if row["kind"] == "gpu check":
            mark = {True: "ok", False: "FAIL", None: "not made"}[row["passed"]]
            text = f"{mark:<9}{row['name']}: {row['detail']}"
            lines += textwrap.wrap(text, 79, subsequent_indent=" " * 9)
    lines += [""] + [
        f"{row['what']}: {row['bytes_a_second'] / 1e9:.0f} GB/s"
        for row in made
        if row["kind"] == "gpu bandwidth"
    ]
    read = max((r["bytes_a_second"] for r in made if r["kind"] == "gpu bandwidth"), default=0.0)
    lines += [
        "",
        f"{'tensors':<16}{'dtype':<7}{'what':<9}{'torch ms':>10}{'ours ms':>10}{'ratio':>8}"
        f"{'ours GB/s':>11}{'/ best':>8}",
        "-" * 79,
    ]
    lines += [_line(row, read) for row in made if row["kind"] == "gpu time"]
    lines.append(f"* asked of an H200: a norm of at least {SPEED}, a usual step of at most {USUAL}")
    return "\n".join(lines)


def _line(row: Row, best: float) -> str:
    line = f"{row['case']:<16}{row['dtype']:<7}{row['what']:<9}{row['torch_milliseconds']:>10.3f}"
    missed = row["what"] == "usual" and row["ratio"] > USUAL
    line += f"{row['milliseconds']:>10.3f}{row['ratio']:>8.3f}{'*' if missed else ' '}"
    if row["what"] in ("norm", "function", "usual"):  # one read of the gradients
        speed = row["bytes"] / row["milliseconds"] * 1e3
        missed = row["what"] == "norm" and speed < SPEED * best and row["case"] == CASES[0].name
        line += f"{speed / 1e9:>10.0f}{speed / best:>8.2f}{'*' if missed else ''}"
    return line.rstrip()
