"""Decides, from options and environment, what a host's launcher will do; runs nothing."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import variables as names
from .devices import count_devices, cpus, shared_core_warning, threads_per_rank
from .environment import Hosts
from .errors import LaunchError
from .network import endpoint, interface_warnings, interfaces, refuse_port, unbracketed
from .options import RunOptions


@dataclass(frozen=True)
class Plan:
    """A run, as one host sees it."""

    nnodes: int
    node_rank: int
    nproc_per_node: int
    master_addr: str
    master_port: int | None
    """None: the head finds a free one and publishes it."""
    run_id: str
    hosts: tuple[str, ...]
    """In rank order; empty where only their number is known."""
    run_dir: Path
    log_dir: Path
    environ: dict[str, str]
    """What the launcher adds to its own environment."""
    warnings: tuple[str, ...] = ()

    def host_name(self, node_rank: int) -> str:
        """Name a host for a reader."""
        if node_rank < len(self.hosts):
            return self.hosts[node_rank]
        return f"{self.master_addr} (node 0)" if node_rank == 0 else f"node {node_rank}"


def make_plan(options: RunOptions, found: Hosts, environ: Mapping[str, str], own_id: str) -> Plan:
    """Decide ranks, address and environment of a run.

    Args:
        options: what the user chose; it counts before what was found.
        found: the hosts, as the scheduler tells them.
        environ: usually `os.environ`.
        own_id: names this run where no scheduler does.

    Raises:
        LaunchError: options that contradict each other or the scheduler; the message says what
            to do.
    """
    nnodes, node_rank = _hosts(options, found)
    addr = options.master_addr or found.master_addr
    if nnodes == 1:
        addr = options.master_addr or "127.0.0.1"
    if addr is None:
        raise LaunchError(
            f"--nnodes {nnodes}: give --master-addr, an address of host 0 that all hosts reach"
        )
    port = options.master_port or found.master_port
    if port is not None:
        refuse_port(port)
    elif nnodes > 1 and found.source != "slurm":
        raise LaunchError(
            f"--nnodes {nnodes}: give --master-port, a free port on host 0, alike on all hosts "
            "(only under Slurm is it found and published)"
        )
    ranks = options.nproc_per_node or count_devices(environ) or cpus()
    run_dir = Path(environ.get(names.RUN_DIR) or Path("shardclip-runs") / (found.run_id or own_id))
    run_dir = run_dir.absolute()
    shared = shared_core_warning(cpus(), ranks)
    warnings = [*([shared] if shared else []), *interface_warnings(environ, interfaces())]
    return Plan(
        nnodes=nnodes,
        node_rank=node_rank,
        nproc_per_node=ranks,
        master_addr=unbracketed(addr),
        master_port=port,
        run_id=found.run_id or "run",
        hosts=found.names if len(found.names) == nnodes else (),
        run_dir=run_dir,
        log_dir=Path(options.log_dir).absolute() if options.log_dir else run_dir,
        environ=_environ(options, environ, run_dir, ranks),
        warnings=tuple(warnings),
    )


def _hosts(options: RunOptions, found: Hosts) -> tuple[int, int]:
    nnodes = options.nnodes or found.nnodes
    if found.source in {"slurm", "kubernetes"} and nnodes != found.nnodes:
        raise LaunchError(
            f"--nnodes {nnodes}, but {found.source} gives {found.nnodes} hosts; leave --nnodes out "
            "or ask the scheduler for that many"
        )
    node_rank = found.node_rank if options.node_rank is None else options.node_rank
    if options.node_rank is not None and found.source == "slurm" and node_rank != found.node_rank:
        raise LaunchError(
            f"--node-rank {node_rank}, but Slurm's SLURM_NODEID is {found.node_rank}; leave "
            "--node-rank out (in a batch script it stands unexpanded only inside srun)"
        )
    if nnodes > 1 and options.node_rank is None and found.source == "none":
        raise LaunchError(f"--nnodes {nnodes}: give --node-rank, 0 to {nnodes - 1}, on each host")
    if not 0 <= node_rank < nnodes:
        raise LaunchError(f"--node-rank {node_rank}: with {nnodes} hosts it is 0 to {nnodes - 1}")
    return nnodes, node_rank


def _environ(
    options: RunOptions, environ: Mapping[str, str], run_dir: Path, ranks: int
) -> dict[str, str]:
    added = {
        "OMP_NUM_THREADS": str(threads_per_rank(cpus(), ranks)),
        names.RUN_DIR: str(run_dir),
        names.STOP_FILE: str(run_dir / "stop"),
        names.MARKER: str(run_dir / "stopped"),
        names.NOTICE_SIGNALS: ",".join(options.notice_signals),
    }
    if options.rdzv_backend == "c10d" or options.max_restarts:
        # with the agents' store shared, a restarted run reads keys of the failed one
        added["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return {name: value for name, value in added.items() if not environ.get(name)}


def torchrun_arguments(options: RunOptions, plan: Plan, port: int, control: str) -> list[str]:
    """Return torchrun's arguments for this host.

    Args:
        options: the run's.
        plan: this host's part.
        port: the store's on host 0.
        control: the socket by which guards reach this host's launcher.
    """
    conf = [f"timeout={int(options.join_timeout)}"]
    arguments = [
        f"--nnodes={plan.nnodes}",
        f"--nproc-per-node={plan.nproc_per_node}",
        f"--rdzv-id={plan.run_id}",
        f"--max-restarts={options.max_restarts}",
    ]
    if options.rdzv_backend == "c10d":
        # arrival must not decide who hosts the store, nor a name's look
        conf += [
            f"is_host={'true' if plan.node_rank == 0 else 'false'}",
            f"join_timeout={int(options.join_timeout)}",
        ]
        arguments += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint(plan.master_addr, port)}",
        ]
    else:
        arguments += [
            f"--node-rank={plan.node_rank}",
            f"--master-addr={plan.master_addr}",
            f"--master-port={port}",
        ]
    # torch leaves its own log directory behind; this one goes with the socket
    torch_logs = Path(control).with_name("torch")
    arguments += [f"--rdzv-conf={','.join(conf)}", f"--log-dir={torch_logs}", "--no-python"]
    guard = [
        sys.executable, "-u", "-m", "shardclip.launch.guard",
        f"--control={control}", f"--log-dir={plan.log_dir}", f"--tee={options.tee}",
        f"--notice-signals={','.join(options.notice_signals)}", f"--grace={options.grace:g}",
    ]  # fmt: skip
    if options.no_python:
        guard.append("--program")
    module = ["-m"] if options.module else []
    return [*arguments, *guard, "--", *module, *options.command]
