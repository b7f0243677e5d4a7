"""Time shardclip beside torch on the same gradients: `python -m benchmarks`."""

import argparse
import time
from pathlib import Path

from .cases import CASES, Case, quick
from .measuring import Plan, measure
from .ranks import Measurement, Settings
from .records import context, default_path, rows, table, write


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--case", choices=names, action="append", help="only this; repeatable")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a smoke test")
    parser.add_argument("--rounds", type=int, default=3, help="fresh sets of processes [3]")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls in a round [7]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to add to [runs/benchmarks/<time>.jsonl]")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure the chosen cases, write the rows and print the table."""
    args = parse_args()
    chosen = [case for case in CASES if not args.case or case.name in args.case]
    plan = Plan(args.rounds, Settings(repeats=args.repeats, seed=args.seed))
    if args.quick:
        chosen = [quick(case) for case in chosen]
        plan = Plan(1, Settings(repeats=2, seed=args.seed))
    described = context(plan)  # before the ranks start: they add to the load
    start = time.perf_counter()
    found: list[Measurement] = []
    for group in _by_ranks(chosen):
        found += measure(group, plan, report=lambda line: print(line, flush=True))
    made = rows(found, chosen, described)
    path = args.out or default_path()
    write(path, made)
    print(f"\n{table(made)}\n")
    print(f"{len(made)} rows in {path}, {time.perf_counter() - start:.0f} s")


def _by_ranks(cases: list[Case]) -> list[list[Case]]:
    """Put cases together that run in the same processes."""
    groups: dict[int, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.ranks, []).append(case)
    return list(groups.values())


if __name__ == "__main__":
    main()
