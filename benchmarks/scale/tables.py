"""Plans and latencies in tables; each says whether it was measured or modelled."""

from collections.abc import Sequence
from typing import Any

from benchmarks.records import Row


def planning_table(made: Sequence[Row]) -> str:
    """Set the measured plans in a table."""
    lines = [
        "MEASURED in one process: a GradClipper built, and its first plan, on one rank",
        f"{'':<6}{'pp x replicate':>17}{'':>7}{'parameters':>11}{'CPU ms':>8}{'memory MiB':>13}"
        f"{'payload':>9}{'busiest':>9}",
        f"{'model':<6}{'x shard x tp':>17}{'ranks':>7}{'of a rank':>11}{'in all':>8}"
        f"{'peak':>7}{'kept':>6}{'KiB':>9}{'/ fair':>9}",
        "-" * 80,
    ]
    for row in made:
        if row["kind"] != "planning":
            continue
        spent = (row["build"] + row["first"]) * 1e3
        lines.append(
            f"{row['model']:<6}{row['mesh']:>17}{row['ranks']:>7}{row['parameters']:>11}"
            f"{spent:>8.1f}{row['memory'] / 2**20:>7.1f}{row['kept'] / 2**20:>6.1f}"
            f"{row['lanes'] / 128:>9.1f}{row['most'] / row['fair']:>9.4f}"
        )
    return "\n".join(lines)


def latency_table(made: Sequence[Row]) -> str:
    """Set the modelled latencies in a table."""
    lines = [
        "MODELLED, not measured: microseconds of a step's all-reduces (their number)",
        f"{'':<30}{'torch,':>11}{'':>24}{'GradClipper':>13}",
        f"{'model':<6}{'mesh':>17}{'ranks':>7}{'per stage':>11}{'torchtitan':>12}"
        f"{'GradClipper':>12}{'of a replica':>13}",
        "-" * 78,
    ]
    by_mesh: dict[Any, list[Row]] = {}
    for row in made:
        if row["kind"] == "modelled latency":
            by_mesh.setdefault((row["model"], row["mesh"], row["ranks"]), []).append(row)
    for (model, mesh, ranks), held in by_mesh.items():
        cells = [f"{row['modelled_microseconds']:.0f} ({row['all_reduces']})" for row in held]
        line = f"{model:<6}{mesh:>17}{ranks:>7}"
        for cell, width in zip(cells, (11, 12, 12, 13), strict=True):
            line += f"{cell:>{width}}"
        lines.append(line)
    return "\n".join(lines)
