"""Draw the runs of `train_lm.py`: loss, norm before and after clipping, share of clipped steps.

As a script it draws again from what was recorded:

    python examples/plot_training.py runs/demo/unclipped.jsonl runs/demo/clipped.jsonl
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lm_report import losses

from shardclip.record.run_file import Run, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#c44e52", "#1f6fb4")  # apart in grey too, and for colour-blind eyes
AFTER, THRESHOLD = "#0b2545", "#666666"
WINDOW = 20  # steps


def draw(runs: Sequence[Run], max_norm: float, path: Path) -> None:
    """Draw runs into the picture `path`.

    Args:
        runs: What their clippers recorded.
        max_norm: The threshold of the clipped run.
        path: The PNG file to write.
    """
    import matplotlib as mpl  # noqa: PLC0415  only the rank that draws pays for it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(
        3, 1, figsize=(9, 9.5), sharex=True, height_ratios=(3, 3, 1.8), layout="constrained"
    )
    for colour, run in zip(COLOURS, runs, strict=False):
        _draw_loss(axes[0], run, colour)
        _draw_norms(axes[1], run, colour)
        _draw_share(axes[2], run, colour, max_norm)
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


def _numbers(run: Run) -> list[int]:
    return [step.step for step in run.steps]


def _draw_loss(axes: "Axes", run: Run, colour: str) -> None:
    loss, label = losses(run), f"{run.name}, mean of {WINDOW} steps"
    axes.plot(_numbers(run), loss, color=colour, alpha=0.35, linewidth=0.8)
    axes.plot(_numbers(run), smooth(loss), color=colour, linewidth=1.9, label=label)


def _draw_norms(axes: "Axes", run: Run, colour: str) -> None:
    before = [step.total_norm for step in run.steps]
    axes.plot(_numbers(run), before, color=colour, linewidth=1.0, label=run.name)
    if _was_clipped(run):
        after = [step.clipped_norm for step in run.steps]
        label = f"{run.name}, after clipping"
        axes.plot(_numbers(run), after, color=AFTER, linewidth=1.4, label=label)


def _draw_share(axes: "Axes", run: Run, colour: str, max_norm: float) -> None:
    if _was_clipped(run):
        flags, style = [step.clipped for step in run.steps], "-"
        label = f"{run.name}: steps clipped"
    else:
        flags, style = [step.total_norm > max_norm for step in run.steps], "--"
        label = f"{run.name}: steps above max_norm, left as they are"
    share = smooth([100.0 * flag for flag in flags])
    axes.plot(_numbers(run), share, style, color=colour, linewidth=1.6, label=label)


def _was_clipped(run: Run) -> bool:
    return any(step.clipped for step in run.steps)


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
    """Draw recorded runs again."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN.jsonl")
    args = parser.parse_args()
    runs = [read(path) for path in args.runs]
    max_norm = min(step.max_norm for run in runs for step in run.steps)
    draw(runs, max_norm, args.runs[0].with_name("training.png"))


if __name__ == "__main__":
    main()
