"""The command ``shardclip``: pictures and thresholds from a recorded run."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shardclip.record import Run, RunFileError

from ._version import __version__
from .record import run_file

OK, REFUSED = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Args:
        argv: The arguments without the program's name; None: those of this process.
    """
    args = _parser().parse_args(argv)
    actions = {"plot": _plot, "report": _report, "suggest": _suggest}
    try:
        actions[args.action](args)
    except (RunFileError, ImportError) as error:
        return _refused(args.action, str(error))
    except BrokenPipeError:  # the reader has gone (`| head`); do not fail again while closing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return _refused(args.action, f"{error.filename}: {error.strerror}")
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "shardclip",
        description="Pictures and thresholds from what shardclip.logging.JsonLines wrote.",
    )
    parser.add_argument("--version", action="version", version=f"shardclip {__version__}")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, what, suffix in (
        ("plot", "draw norms, share clipped, spikes and modules", "png, svg, pdf"),
        ("report", "write the same as one HTML page that stands alone", "html"),
    ):
        action = actions.add_parser(name, help=what, description=f"{what.capitalize()}.")
        action.add_argument("runs", nargs="+", metavar="RUN.jsonl", help="side by side if several")
        action.add_argument(
            "-o", "--output", type=Path, metavar="FILE", help=f"{suffix}; default: beside the first"
        )
    suggest = actions.add_parser(
        "suggest",
        help="recommend a max_norm",
        description="The norm's quantiles, what share of steps each would have clipped, and a "
        "recommended max_norm with the reason.",
    )
    suggest.add_argument("runs", nargs="+", metavar="RUN.jsonl")
    suggest.add_argument(
        "--warmup", type=_count, metavar="N", help="steps to leave out; default: found by itself"
    )
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _plot(args: argparse.Namespace) -> None:
    plot = importlib.import_module("shardclip.pictures.plot")
    output = _output(args, ".png")
    plot.save(_read(args), output)
    print(output)


def _report(args: argparse.Namespace) -> None:
    report = importlib.import_module("shardclip.pictures.report")
    output = _output(args, ".html")
    output.write_text(report.page(_read(args)), encoding="utf-8")
    print(output)


def _suggest(args: argparse.Namespace) -> None:
    suggest = importlib.import_module("shardclip.pictures.suggest")
    texts = [
        suggest.text(run, found)
        for run in _read(args)
        for found in suggest.suggest(run, args.warmup)
    ]
    print("\n\n".join(texts))


def _output(args: argparse.Namespace, suffix: str) -> Path:
    output: Path = args.output or Path(args.runs[0]).with_suffix(suffix)
    if output.resolve() in [Path(run).resolve() for run in args.runs]:
        raise RunFileError(f"{output} is the run itself; give another file with -o")
    return output


def _read(args: argparse.Namespace) -> list[Run]:
    """Read the runs; what the reader passed over is said, and no error."""
    runs = [run_file.read(path) for path in args.runs]
    for path, run in zip(args.runs, runs, strict=True):
        for note in run.notes:
            print(f"shardclip {args.action}: {path}: {note}", file=sys.stderr)
    return runs


def _refused(action: str, message: str) -> int:
    print(f"shardclip {action}: {message}", file=sys.stderr)
    return REFUSED
