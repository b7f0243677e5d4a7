"""Time shardclip beside what a user would call instead, on the same gradients.

A case is spelled `layout/shapes[/dtype][@ranks]`, for example `fsdp2/layers`, `hsdp/small/bf16` or
`fsdp2/gpt2-small@2`; `--list` shows the words. Without options a selection of a few minutes runs.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

from . import cases, records
from .cases import SHAPES, Case
from .measuring import Plan, Settings, measure, prepare, rounds_of, rows_of, together
from .report import tables, targets


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--case", type=_case, action="append", help="only this; repeatable")
    chosen.add_argument("--targets", action="store_true", help="what is to be reached, and is")
    chosen.add_argument("--all", action="store_true", help="everything: hours")
    chosen.add_argument("--list", action="store_true", help="show the words of a case, and stop")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: a smoke test of each layout"
    )
    parser.add_argument(
        "--rounds", type=int, help="fresh sets of processes [3 for --targets and --case, else 1]"
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed calls in a round [9]")
    parser.add_argument("--threads", type=int, default=1, help="of each rank [1]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to add to [runs/benchmarks/<time>.jsonl]")
    return parser.parse_args(arguments)


def _case(name: str) -> Case:
    try:
        return cases.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> None:
    """Measure the chosen cases, write the rows and print the tables."""
    args = parse_args()
    if args.list:
        print(_words())
        return
    chosen = _chosen(args)
    settings = Settings(args.repeats, args.seed, args.threads)
    plan = Plan(args.rounds or (3 if args.targets or args.case else 1), settings)
    if args.quick:
        chosen = [cases.quick(case) for case in chosen]
        plan = Plan(1, Settings(2, args.seed, args.threads))
    described = records.machine()  # before the ranks start: they add to the load
    start = time.perf_counter()
    path = args.out or records.default_path()
    made: list[records.Row] = []
    prepare(chosen)
    with _progress(chosen, plan) as advance:
        for group in together(chosen):
            added = rows_of(measure(group, plan, advance), group, plan, described)
            records.write(path, added)  # at once: a long run may be stopped
            made += added
    print(f"\n{tables.of_cases(made)}\n")
    if not args.case:
        print(f"{targets.table(made)}\n")
    print(f"{len(made)} rows in {path}\n{time.perf_counter() - start:.0f} s")


def _chosen(args: argparse.Namespace) -> list[Case]:
    if args.case:
        return list(dict.fromkeys(args.case))
    names = cases.TARGETED if args.targets else cases.ALL if args.all else cases.DEFAULT
    if names is cases.DEFAULT and args.quick:
        names = cases.QUICK
    return [cases.parse(name) for name in dict.fromkeys(names)]


@contextmanager
def _progress(chosen: list[Case], plan: Plan) -> Iterator[Callable[[str], None]]:
    """Show a bar where stderr is a terminal, else a line for each case."""
    total = sum(len(group) * rounds_of(group, plan) for group in together(chosen))
    bar = tqdm(total=total, disable=not sys.stderr.isatty(), ncols=79, leave=False)
    start, done = time.perf_counter(), 0

    def advance(name: str) -> None:
        nonlocal done
        done += 1
        bar.set_description_str(name, refresh=False)
        bar.update()
        if bar.disable:
            took = time.perf_counter() - start
            print(f"{done:>4}/{total} {name:<40} {took:>6.0f} s", flush=True)

    with bar:
        yield advance


def _words() -> str:
    lines = ["layouts:"]
    lines += [f"  {name:<14}{text}" for name, text in cases.LAYOUTS.items()]
    lines += ["shapes:"]
    lines += [f"  {name:<14}{shapes.text}" for name, shapes in SHAPES.items()]
    lines += [f"dtypes: {', '.join(cases.DTYPES)}", "without options:"]
    return "\n".join(lines + [f"  {name}" for name in cases.DEFAULT])


if __name__ == "__main__":
    main()
