"""One picture for each question that the benchmark answers."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import CLIPPED, FIRST, USUAL
from benchmarks.measuring import ours
from benchmarks.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS = ("#1f6fb4", "#0b2545", "#2a9d8f", "#7a5195", "#58508d", "#4c956c")
_THEIRS = ("#c44e52", "#e07b39", "#b08900", "#8c564b")  # apart in grey too
_MARKS = "osv^D<>P"
_SHOWN = (
    "torch clip_grad_norm_",
    "FSDP1 clip_grad_norm_",
    "accelerate",
    "torchtitan",
    "shardclip.clip_grad_norm_",
    "GradClipper.clip_",
    "GradClipper(overlap=True)",
)

Points = dict[str, list[tuple[float, list[float]]]]
"""Contender -> positions, each with lower quartile, median and upper quartile."""


def draw(made: Sequence[Row], folder: Path) -> dict[str, Path]:
    """Draw what the rows allow; return question -> picture."""
    import matplotlib as mpl  # noqa: PLC0415  only who draws pays for it

    mpl.use("Agg")
    clips = [row for row in made if row["kind"] == "clip"]
    modelled = [row for row in made if row["kind"] == "modelled latency"]
    pictures: dict[str, tuple[str, Callable[[], Figure | None]]] = {
        "How does the time grow with the number of ranks?": (
            "world-size.png",
            lambda: _against_ranks(clips),
        ),
        "How does the time grow with the number of parameters?": (
            "parameters.png",
            lambda: _against_parameters(clips),
        ),
        "How much memory does a step touch?": ("bytes.png", lambda: _bytes(clips)),
        "How does the error grow with the size?": ("error.png", lambda: _errors(clips)),
        "How long do the all-reduces take on thousands of GPUs? (modelled)": (
            "latency-modelled.png",
            lambda: _latency(modelled),
        ),
    }
    drawn = {}
    folder.mkdir(parents=True, exist_ok=True)
    for question, (name, make) in pictures.items():
        figure = make()
        if figure is not None:
            _legend(figure)
            figure.savefig(folder / name, dpi=110, metadata={"Software": None})
            drawn[question] = folder / name
    return drawn


def _figure(columns: int = 1) -> tuple["Figure", list["Axes"]]:
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(
        1, columns, figsize=(4.6 * columns + 0.6, 4.2), layout="constrained", squeeze=False
    )
    plt.close(figure)  # it is saved, never shown
    return figure, list(axes[0])


def _legend(figure: "Figure") -> None:
    """Name the curves below all panels, where none runs into it."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=2 * len(figure.axes),
        fontsize=8,
        frameon=False,
    )


def _style(name: str) -> dict[str, Any]:
    """Give each contender the same colour and mark in every picture."""
    index = _SHOWN.index(name) if name in _SHOWN else len(name)
    colours = _OURS if ours({"contender": name}) else _THEIRS
    return {"color": colours[index % len(colours)], "marker": _MARKS[index % len(_MARKS)]}


def _points(rows: Iterable[Row], position: str, value: str) -> Points:
    points: Points = {}
    for row in rows:
        if row["contender"] in _SHOWN:
            points.setdefault(row["contender"], []).append((row[position], row[value]))
    return {name: sorted(found) for name, found in points.items()}


def _lines(axes: "Axes", points: Points) -> None:
    """Draw medians, with a bar from quartile to quartile."""
    for name, found in points.items():
        at = [position for position, _ in found]
        middle = [quartiles[1] for _, quartiles in found]
        below = [quartiles[1] - quartiles[0] for _, quartiles in found]
        above = [quartiles[2] - quartiles[1] for _, quartiles in found]
        axes.errorbar(at, middle, yerr=[below, above], label=name, capsize=3, **_style(name))


def _finish(axes: "Axes", title: str, across: str, up: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _against_ranks(rows: Sequence[Row]) -> "Figure | None":
    chosen = [r for r in rows if (r["layout"], r["shapes"], r["dtype"]) == _LAYERS]
    if len({row["ranks"] for row in chosen}) < 2:
        return None
    figure, panels = _figure(2)
    for axes, step in zip(panels, (USUAL, CLIPPED), strict=True):
        _lines(axes, _points((r for r in chosen if r["step"] == step), "ranks", "milliseconds"))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(bottom=0)
        title = f"FSDP2, 24 x (1024 x 1024), {step} step"
        _finish(axes, title, "ranks", "ms, maximum over ranks")
    return figure


_LAYERS = ("fsdp2", "layers", "fp32")


def _against_parameters(rows: Sequence[Row]) -> "Figure | None":
    small = [r for r in rows if r["shapes"].startswith("small") and r["dtype"] == "fp32"]
    chosen = [r for r in small if r["layout"] == "fsdp2" and r["ranks"] == 4]
    if len({row["parameters"] for row in chosen}) < 2:
        return None
    figure, panels = _figure(2)
    for axes, step in zip(panels, (USUAL, FIRST), strict=True):
        here = (r for r in chosen if r["step"] == step)
        _lines(axes, _points(here, "parameters", "milliseconds"))
        axes.set_xscale("log")
        axes.set_yscale("log")
        what = "usual step" if step == USUAL else "first call"
        title = f"FSDP2 on 4 ranks, (64 x 64) each, {what}"
        _finish(axes, title, "parameters", "ms")
    return figure


def _bytes(rows: Sequence[Row]) -> "Figure | None":
    chosen = [r for r in rows if r["shapes"] == "layers" and r["dtype"] == "fp32"]
    chosen = [r for r in chosen if r["ranks"] in (1, 4) and r["contender"] in _SHOWN]
    layouts = list(dict.fromkeys(r["layout"] for r in chosen if r["case"] == _plainly(r)))
    names = [name for name in _SHOWN if any(r["contender"] == name for r in chosen)]
    if not layouts:
        return None
    figure, panels = _figure(2)
    for axes, step in zip(panels, (USUAL, CLIPPED), strict=True):
        for index, name in enumerate(names):
            for what, shade in (("read", 1.0), ("written", 0.45)):
                found = {
                    r["layout"]: r["counts"][what] / r["bytes"]
                    for r in chosen
                    if (r["contender"], r["step"]) == (name, step) and r["case"] == _plainly(r)
                }
                base = {"read": {}, "written": _read_of(chosen, name, step)}[what]
                at = [layouts.index(one) + (index - len(names) / 2) * 0.11 for one in found]
                style = _style(name)
                axes.bar(
                    at,
                    list(found.values()),
                    width=0.1,
                    bottom=[base.get(one, 0.0) for one in found],
                    color=style["color"],
                    alpha=shade,
                    label=name if what == "read" else None,
                )
        axes.set_xticks(range(len(layouts)), layouts, fontsize=8, rotation=20)
        title = f"24 x (1024 x 1024), {step} step: read (dark), written (light)"
        _finish(axes, title, "layout", "bytes / bytes of gradients")
    return figure


def _plainly(row: Row) -> str:
    """Return the name of a row's case where the number of ranks is the usual one."""
    return f"{row['layout']}/{row['shapes']}"


def _read_of(rows: Sequence[Row], name: str, step: str) -> dict[str, float]:
    return {
        r["layout"]: r["counts"]["read"] / r["bytes"]
        for r in rows
        if (r["contender"], r["step"]) == (name, step) and r["case"] == _plainly(r)
    }


def _errors(rows: Sequence[Row]) -> "Figure | None":
    chosen = [r for r in rows if r["shapes"].startswith("one-") and r["step"] == USUAL]
    if len({row["elements"] for row in chosen}) < 2:
        return None
    figure, (axes,) = _figure()
    styles = {"fp32": "-", "bf16": "--", "fp16": ":"}
    for name in ("torch clip_grad_norm_", "GradClipper.clip_"):
        for dtype, line in styles.items():
            found = sorted(
                (r["elements"], max(r["norm_error"], 1e-17))
                for r in chosen
                if (r["contender"], r["dtype"]) == (name, dtype)
            )
            if found:
                at, errors = zip(*found, strict=True)
                axes.plot(at, errors, line, label=f"{name} {dtype}", **_style(name))
    axes.axhline(1e-6, color="#666666", linewidth=1, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _finish(axes, "one tensor, one process", "elements", "norm's error relative to float64")
    return figure


def _latency(rows: Sequence[Row]) -> "Figure | None":
    if not rows:
        return None
    figure, panels = _figure(2)
    for axes, model in zip(panels, dict.fromkeys(row["model"] for row in rows), strict=False):
        for name in dict.fromkeys(row["contender"] for row in rows):
            found = sorted(
                (r["ranks"], r["modelled_microseconds"])
                for r in rows
                if (r["contender"], r["model"]) == (name, model)
            )
            at, times = zip(*found, strict=True)
            known = {"torch": _SHOWN[0], "GradClipper": "GradClipper.clip_"}
            axes.plot(at, times, label=name, **_style(known.get(name.split(" ")[0], name)))
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        title = f"MODELLED, not measured: all-reduces of a {model} model's step"
        _finish(axes, title, "GPUs", "modelled microseconds")
    return figure
