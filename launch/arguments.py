"""The command line of `shardclip-launch`, read into options."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import NoReturn

from .errors import EXIT_CODES, REFUSED, LaunchError
from .options import SBATCH_FLAGS, SBATCH_OPTIONS, BatchOptions, RunOptions


class _Parser(argparse.ArgumentParser):
    """Names the valid options where an unknown one is given."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; an unknown option is refused by the command's own parser."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown:
            valid = sorted(o for a in self._actions for o in a.option_strings if o[:2] == "--")
            given = unknown[1].split("=")[0]
            near = difflib.get_close_matches(given, valid, 1)
            message = f"unknown option {given}" + (f"; did you mean {near[0]}?" if near else "")
            message += f"\nvalid options: {' '.join(valid)}"
            if self.prog.endswith("slurm"):
                message += "\nany other of sbatch's: --sbatch KEY=VALUE"
        self.exit(REFUSED, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    top = _Parser(
        prog="shardclip-launch", allow_abbrev=False, epilog=EXIT_CODES,
        description="Start a training script on one machine, on several hosts, or under Slurm.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = top.add_subparsers(dest="action", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, description=text, allow_abbrev=False, epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    run = add("run", "start the ranks of this host")
    _add_hosts(run)
    _add_run(run)
    batch = add("slurm", "render a batch script and submit it; prints the job's id")
    _add_batch(batch)
    check = add("check", "try hosts, devices and network on the hosts and ranks of a run")
    _add_hosts(check)
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.add_argument("--timeout", type=float, default=45.0, metavar="SECONDS",
                       help="wait so long for hosts that do not answer (default: 45)")  # fmt: skip
    env = add("env", "show which launcher was detected and the ranks that follow")
    env.add_argument("--json", action="store_true", help="print one JSON object")
    return top


def _add_hosts(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "-n",
        "--nproc-per-node",
        "--procs-per-node",
        type=_count,
        metavar="RANKS",
        help="ranks on this host (default: one a device, else one a CPU)",
    )
    to.add_argument(
        "--nnodes",
        type=_count,
        metavar="HOSTS",
        help="hosts in the run (default: as the scheduler says, else 1)",
    )
    to.add_argument("--node-rank", type=int, metavar="RANK", help="this host's place, from 0")
    to.add_argument("--master-addr", metavar="ADDR", help="an address of host 0")
    to.add_argument(
        "--master-port",
        type=int,
        metavar="PORT",
        help="a free port on host 0 (default: found and published)",
    )
    to.add_argument(
        "--rdzv-backend",
        "--rdzv",
        choices=("static", "c10d"),
        default="static",
        help="how the hosts meet (default: static)",
    )
    to.add_argument("--log-dir", metavar="DIR", help="one file a rank goes here")
    to.add_argument("--host-timeout", type=float, default=60.0, metavar="SECONDS",
                    help="give a silent host up after this (default: 60)")  # fmt: skip


def _add_run(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="restarts by torchrun (default: 0; leave retries to the scheduler)",
    )
    to.add_argument(
        "--tee",
        choices=("0", "all", "none"),
        default="0",
        help="ranks shown on screen (default: 0)",
    )
    to.add_argument(
        "--notice-signals",
        type=_signals,
        default=("TERM", "USR1"),
        metavar="LIST",
        help="signals passed to every rank as notices (default: TERM,USR1)",
    )
    to.add_argument(
        "--grace",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="from TERM until ranks that did not stop are killed (default: 120)",
    )
    to.add_argument(
        "--join-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="hosts wait so long for each other at the start (default: 300)",
    )
    to.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    to.add_argument("--no-python", action="store_true", help="SCRIPT is a program")
    to.add_argument("--dry-run", action="store_true", help="print torchrun's command and stop")
    to.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS...]",
                    help="the script and its own arguments")  # fmt: skip


def _add_batch(to: argparse.ArgumentParser) -> None:
    to.add_argument("-N", "--nodes", type=_count, required=True, help="hosts")
    to.add_argument(
        "-n",
        "--procs-per-node",
        "--nproc-per-node",
        type=_count,
        metavar="RANKS",
        help="ranks a host (default: one a device)",
    )
    to.add_argument(
        "--launcher",
        choices=("torchrun", "srun"),
        default="torchrun",
        help="torchrun: one agent a host; srun: one task a rank (default: torchrun)",
    )
    to.add_argument("--dry-run", action="store_true", help="print the script, secrets hidden")
    to.add_argument("--output", metavar="FILE", help="write the script and stop")
    to.add_argument(
        "--wait", action="store_true", help="follow the job's log; exit with the job's code"
    )
    to.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any further option of sbatch",
    )
    _add_environment(to)
    _add_limits(to)
    _add_sbatch(to)
    to.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS...]",
                    help="the script and its own arguments")  # fmt: skip


def _add_environment(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for the ranks",
    )
    to.add_argument("--python", metavar="PATH", help="interpreter on the hosts (default: this one)")
    to.add_argument(
        "--run-dir",
        default="shardclip-runs",
        metavar="DIR",
        help="logs and markers of each job go below (default: shardclip-runs)",
    )


def _add_limits(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--notice-signal",
        choices=("USR1", "USR2"),
        default="USR1",
        help="how Slurm announces the time limit (default: USR1)",
    )
    to.add_argument(
        "--grace",
        type=_count,
        default=120,
        metavar="SECONDS",
        help="time between that notice and the limit (default: 120)",
    )
    to.add_argument(
        "--max-requeues",
        type=int,
        default=3,
        metavar="N",
        help="start a stopped job again so often (default: 3)",
    )
    to.add_argument("--tee", choices=("0", "all", "none"), default="0",
                    help="ranks shown in the job's output (default: 0)")  # fmt: skip


def _add_sbatch(to: argparse.ArgumentParser) -> None:
    known = to.add_argument_group("sbatch's options, passed on")
    for name in SBATCH_OPTIONS:
        how: dict[str, str] = {"nargs": "?", "const": ""} if name in SBATCH_FLAGS else {}
        known.add_argument(f"--{name}", metavar=name.upper(), dest=f"sbatch_{name}", **how)  # type: ignore[arg-type]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _signals(text: str) -> tuple[str, ...]:
    known = ("TERM", "USR1", "USR2", "HUP")
    names = tuple(name.upper().removeprefix("SIG") for name in text.split(",") if name)
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
    return names


def _script(command: list[str], prog: str) -> tuple[str, ...]:
    # `--` before the script lets its name start with a dash
    words = tuple(command[1:] if command[:1] == ["--"] else command)
    if not words:
        raise LaunchError(f"no script given: shardclip-launch {prog} [options] SCRIPT [ARGS...]")
    return words


def run_options(args: argparse.Namespace) -> RunOptions:
    """Turn the arguments of `run` or `check` into options."""
    given = vars(args)
    fields = {k: v for k, v in given.items() if k in RunOptions.__dataclass_fields__}
    if args.action == "run":
        fields["command"] = _script(args.command, "run")
    return RunOptions(**fields)


def batch_options(args: argparse.Namespace, python: str) -> BatchOptions:
    """Turn the arguments of `slurm` into options."""
    further: dict[str, str | None] = {}
    for name in SBATCH_OPTIONS:
        value = getattr(args, f"sbatch_{name}")
        if value is not None:
            further[name] = value or None
    for item in args.sbatch:
        key, has_value, value = item.removeprefix("--").partition("=")
        further[key] = value if has_value else None
    env = {}
    for item in args.env:
        name, has_value, value = item.partition("=")
        if not has_value:
            raise LaunchError(
                f"--env {item!r}: NAME=VALUE; the submitting shell's own variables are passed on "
                "without it"
            )
        env[name] = value
    return BatchOptions(
        command=_script(args.command, "slurm"),
        nodes=args.nodes,
        launcher=args.launcher,
        procs_per_node=args.procs_per_node,
        sbatch=further,
        env=env,
        python=args.python or python,
        run_dir=args.run_dir,
        notice_signal=args.notice_signal,
        grace=args.grace,
        max_requeues=args.max_requeues,
        tee=args.tee,
    )
