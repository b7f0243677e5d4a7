"""Draw the runs of `train_lm.py`: loss, norm before and after clipping, share of clipped steps.

As a script it draws again from a metrics file:

    python examples/plot_training.py runs/demo/metrics.jsonl --max-norm 0.5
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_report import Record, read_metrics, split_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#c44e52", "#1f6fb4")  # apart in grey too, and for colour-blind eyes
AFTER, THRESHOLD = "#0b2545", "#666666"
WINDOW = 20  # steps


def draw(records: Sequence[Record], max_norm: float, path: Path) -> None:
    """Draw every run in `records` into the picture `path`.

    Args:
        records: One a step, of every run.
        max_norm: The threshold of the clipped run.
        path: The PNG file to write.
    """
    import matplotlib as mpl  # noqa: PLC0415  only the rank that draws pays for it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(
        3, 1, figsize=(9, 9.5), sharex=True, height_ratios=(3, 3, 1.8), layout="constrained"
    )
    for colour, (name, run) in zip(COLOURS, split_runs(records).items(), strict=False):
        _draw_loss(axes[0], name, run, colour)
        _draw_norms(axes[1], name, run, colour)
        _draw_share(axes[2], name, run, colour, max_norm)
    axes[1].axhline(
        max_norm, color=THRESHOLD, linestyle="--", linewidth=1.2, label=f"max_norm {max_norm:g}"
    )
    _label(axes)
    figure.suptitle("The same weights, batches and learning rate, without and with clipping")
    figure.align_ylabels()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def smooth(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Average each value with up to `window` - 1 values before it."""
    averages = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        averages.append(sum(recent) / len(recent))
    return averages


def _column(run: Sequence[Record], key: str) -> list[Any]:
    return [record[key] for record in run]


def _draw_loss(axes: "Axes", name: str, run: Sequence[Record], colour: str) -> None:
    steps, loss = _column(run, "step"), _column(run, "loss")
    axes.plot(steps, loss, color=colour, alpha=0.35, linewidth=0.8)
    axes.plot(
        steps, smooth(loss), color=colour, linewidth=1.9, label=f"{name}, mean of {WINDOW} steps"
    )


def _draw_norms(axes: "Axes", name: str, run: Sequence[Record], colour: str) -> None:
    steps = _column(run, "step")
    axes.plot(steps, _column(run, "total_norm"), color=colour, linewidth=1.0, label=name)
    if _was_clipped(run):
        after = _column(run, "clipped_norm")
        axes.plot(steps, after, color=AFTER, linewidth=1.4, label=f"{name}, after clipping")


def _draw_share(
    axes: "Axes", name: str, run: Sequence[Record], colour: str, max_norm: float
) -> None:
    if _was_clipped(run):
        flags, style, label = _column(run, "clipped"), "-", f"{name}: steps clipped"
    else:
        flags = [norm > max_norm for norm in _column(run, "total_norm")]
        style, label = "--", f"{name}: steps above max_norm, left as they are"
    share = smooth([100.0 * flag for flag in flags])
    axes.plot(_column(run, "step"), share, style, color=colour, linewidth=1.6, label=label)


def _was_clipped(run: Sequence[Record]) -> bool:
    return any(record["clipped"] for record in run)


def _label(axes: Sequence["Axes"]) -> None:
    loss, norm, share = axes
    loss.set_ylabel("training loss (nats a byte)")
    norm.set_yscale("log", subs=[2, 5])
    for axis_format in (norm.yaxis.set_major_formatter, norm.yaxis.set_minor_formatter):
        axis_format("{x:g}")
    norm.set_ylabel("global gradient norm")
    share.set_ylabel(f"% of the last\n{WINDOW} steps")
    share.set_ylim(-4, 104)
    share.set_xlabel("step")
    for panel in axes:
        panel.margins(x=0.01)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        # Above the panel, where no curve can run into it.
        panel.legend(
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=4,
            frameon=False,
            fontsize=9,
            borderaxespad=0.1,
        )


def main() -> None:
    """Draw a metrics file again."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("metrics", type=Path)
    parser.add_argument("--max-norm", type=float, default=0.5)
    args = parser.parse_args()
    draw(read_metrics(args.metrics), args.max_norm, args.metrics.with_name("training.png"))


if __name__ == "__main__":
    main()
