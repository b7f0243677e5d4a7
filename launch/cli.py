"""The command `shardclip-launch`."""

import argparse
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from .arguments import batch_options, parser, run_options
from .devices import count_devices, cpus
from .environment import detect, detect_hosts
from .errors import HOST_LOST, OK, REFUSED, HostLostError, LaunchError
from .quoting import redact

_SHOWN = ("SLURM_", "OMPI_COMM_", "PMI_", "PMIX_RANK", "PET_", "MASTER_", "TORCHELASTIC_",
          "SHARDCLIP_", "NCCL_", "GLOO_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")  # fmt: skip
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Args:
        argv: the arguments without the program's name; None: those of this process.
    """
    args = parser().parse_args(argv)
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "run": _run,
        "slurm": _slurm,
        "check": _check,
        "env": _env,
    }
    try:
        return actions[args.action](args)
    except LaunchError as error:
        print(f"shardclip-launch {args.action}: {error}", file=sys.stderr)
        return REFUSED
    except HostLostError as error:
        print(f"shardclip-launch {args.action}: {error}", file=sys.stderr)
        return HOST_LOST
    except BrokenPipeError:
        # the reader of our output has gone (`| head`); do not fail again while closing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _run(args: argparse.Namespace) -> int:
    from .run import run  # noqa: PLC0415 - needed by this command alone

    return run(run_options(args), dict(os.environ))


def _check(args: argparse.Namespace) -> int:
    from .check import check  # noqa: PLC0415 - needed by this command alone

    return check(run_options(args), dict(os.environ), as_json=args.json, timeout=args.timeout)


def _slurm(args: argparse.Namespace) -> int:
    from .batch_script import render  # noqa: PLC0415 - needed by this command alone

    options = batch_options(args, _own_python())
    if args.dry_run:
        print(render(options, show=redact), end="")
        return OK
    script = render(options)
    if args.output:
        target = Path(args.output)
        # the script may hold values meant for the ranks alone
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700)
        with os.fdopen(descriptor, "w") as file:
            file.write(script)
        return OK
    from .submission import follow, submit  # noqa: PLC0415 - needed here alone

    job = submit(script)
    print(job, flush=True)
    return follow(job) if args.wait else OK


def _own_python() -> str:
    """Return `python3` where PATH gives this interpreter by that name, else its path."""
    found = shutil.which("python3")
    same = found and Path(found).absolute() == Path(sys.executable).absolute()
    return "python3" if same else sys.executable


def _env(args: argparse.Namespace) -> int:
    found = detect(os.environ)
    hosts = detect_hosts(os.environ) if found.source in {"none", "kubernetes"} else None
    shown = {
        name: redact(name, value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_SHOWN) or name in _RANKS
    }
    report = {
        "host": socket.gethostname(),
        **asdict(found),
        "hosts": list(hosts.names) if hosts else [],
        "devices": count_devices(os.environ),
        "cpus": cpus(),
        "variables": shown,
    }
    if args.json:
        print(json.dumps(report, indent=2))
        return OK
    for name, value in report.items():
        if name != "variables":
            text = " ".join(map(str, value)) if isinstance(value, list) else value
            print(f"{name:<18}{'-' if text in {None, ''} else text}")
    print("variables")
    for name, value in shown.items():
        print(f"  {name}={value}")
    if hosts is not None and not hosts.in_step:
        print("\nan allocation's shell: start the script with `shardclip-launch run`, which")
        print(f"starts one launcher on each of the {hosts.nnodes} hosts")
    return OK
