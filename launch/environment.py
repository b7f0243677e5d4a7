"""Which launcher started this process, and the ranks that follow."""

from collections.abc import Mapping
from dataclasses import dataclass

from . import variables as names
from .errors import LaunchError
from .hostlist import expand_counts, expand_hosts
from .variables import number, text

_FIRST_SPECIAL_STEP = 4294967280


@dataclass(frozen=True)
class Placement:
    """One rank's place in a run, as one environment tells it."""

    source: str
    """torchrun, slurm, openmpi, pmi, kubernetes or none."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    nnodes: int = 1
    master_addr: str | None = None
    """The host of rank 0, where the environment tells it."""
    master_port: int | None = None
    """The port of the store on that host, where the environment tells it."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run and this host's place among them; one launcher runs on each."""

    source: str
    """slurm, kubernetes, options or none."""
    nnodes: int = 1
    node_rank: int = 0
    names: tuple[str, ...] = ()
    """The hosts in rank order, where they are known."""
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str | None = None
    """The same on all hosts of the run and on no other run, where the scheduler gives one."""
    in_step: bool = True
    """False in an allocation's batch script or shell, where srun has yet to spread the tasks."""


def detect(environ: Mapping[str, str]) -> Placement:
    """Tell this process's rank from its environment.

    The order matters: torchrun may run inside mpirun or srun, and mpirun inside srun, whose
    variables then number mpirun's own daemons.

    Args:
        environ: usually `os.environ`.

    Raises:
        LaunchError: variables that contradict each other; the message names them.
    """
    found = (
        _torchrun(environ)
        or _mpi(environ, "openmpi", names.OPEN_MPI)
        or _slurm_or_pmi(environ)
        or _kubernetes(environ)
        or Placement("none")
    )
    _validate(found)
    return found


def _master(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    return text(environ, (names.MASTER_ADDR,)), number(environ, (names.MASTER_PORT,))


def _torchrun(environ: Mapping[str, str]) -> Placement | None:
    values = {concept: number(environ, n) for concept, n in names.TORCHRUN.items()}
    if None in (values["rank"], values["world_size"], values["local_rank"]):
        return None
    known = {concept: value for concept, value in values.items() if value is not None}
    if "local_world_size" not in known:
        known["local_world_size"] = max(known["local_rank"] + 1, 1)
    known.setdefault("nnodes", -(-known["world_size"] // known["local_world_size"]))
    addr, port = _master(environ)
    return Placement("torchrun", master_addr=addr, master_port=port, **known)


def _mpi(
    environ: Mapping[str, str], source: str, table: Mapping[str, tuple[str, ...]]
) -> Placement | None:
    rank, size = number(environ, table["rank"]), number(environ, table["world_size"])
    if rank is None or size is None:
        return None
    local_size = number(environ, table["local_world_size"]) or 1
    local_rank = number(environ, table["local_rank"])
    if local_rank is None:
        if size > 1:
            raise LaunchError(
                f"{table['rank'][0]} is set but none of {', '.join(table['local_rank'])}: "
                "the device of this rank is unknown; set LOCAL_RANK, RANK and WORLD_SIZE"
            )
        local_rank = 0
    addr, port = _master(environ)
    return Placement(
        source, rank, size, local_rank, local_size, rank // local_size, -(-size // local_size),
        addr, port,
    )  # fmt: skip


def _slurm_or_pmi(environ: Mapping[str, str]) -> Placement | None:
    slurm = _slurm(environ)
    pmi_size = number(environ, names.PMI["world_size"])
    # srun --mpi=pmi2 sets both alike; MPICH's mpirun inside a step counts for itself
    if pmi_size is not None and (slurm is None or slurm.world_size != pmi_size):
        return _mpi(environ, "pmi", names.PMI)
    return slurm


def _slurm(environ: Mapping[str, str]) -> Placement | None:
    rank = number(environ, names.SLURM["rank"])
    if rank is None or not _in_step(environ):
        return None
    hosts = expand_hosts(text(environ, names.SLURM["hosts"]) or "")
    node_rank = number(environ, names.SLURM["node_rank"]) or 0
    counts = expand_counts(text(environ, names.SLURM["tasks_per_node"]) or "1")
    if len(counts) != len(hosts) or node_rank >= len(hosts):
        raise LaunchError(
            f"Slurm's variables disagree: {len(hosts)} hosts in the node list, "
            f"{len(counts)} task counts, node {node_rank}; unset the SLURM_* variables "
            "that an outer job left, or start this with srun"
        )
    addr, port = _master(environ)
    return Placement(
        "slurm",
        rank,
        number(environ, names.SLURM["world_size"]) or sum(counts),
        number(environ, names.SLURM["local_rank"]) or 0,
        counts[node_rank],
        node_rank,
        len(hosts),
        addr or hosts[0],
        port,
    )


def _in_step(environ: Mapping[str, str]) -> bool:
    """Tell a task that srun started from an allocation's batch script or shell."""
    step = number(environ, names.SLURM["step"])
    # salloc's shell and a batch script may be steps too; Slurm numbers those from the top
    ordinary = step is not None and step < _FIRST_SPECIAL_STEP
    return ordinary and "SLURM_STEP_NODELIST" in environ and "SLURM_TASK_PID" in environ


def _kubernetes(environ: Mapping[str, str]) -> Placement | None:
    hosts = _kubernetes_hosts(environ)
    if hosts is None:
        return None
    return Placement(
        "kubernetes", hosts.node_rank, hosts.nnodes, 0, 1, hosts.node_rank, hosts.nnodes,
        hosts.master_addr, hosts.master_port,
    )  # fmt: skip


def _kubernetes_hosts(environ: Mapping[str, str]) -> Hosts | None:
    nnodes = number(environ, names.KUBERNETES["nnodes"])
    node_rank = number(environ, names.KUBERNETES["node_rank"])
    addr = text(environ, names.KUBERNETES["master_addr"])
    if nnodes is None or node_rank is None or addr is None or "LOCAL_RANK" in environ:
        return None
    port = number(environ, names.KUBERNETES["master_port"])
    return Hosts("kubernetes", nnodes, node_rank, (), addr, port)


def detect_hosts(environ: Mapping[str, str]) -> Hosts:
    """Tell the hosts that a run would take, from the environment of one launcher a host.

    Raises:
        LaunchError: an empty node list, more than one launcher a host, or variables that
            disagree; the message says what to do.
    """
    if text(environ, names.SLURM["job"]) is None:
        return _kubernetes_hosts(environ) or Hosts("none")
    in_step = _in_step(environ)
    listed = names.SLURM["hosts" if in_step else "job_hosts"]
    hosts = expand_hosts(text(environ, listed) or "")
    if in_step:
        counts = expand_counts(text(environ, names.SLURM["tasks_per_node"]) or "1")
        if max(counts) > 1:
            raise LaunchError(
                f"{max(counts)} tasks a host were started, and each would start its own "
                "launcher: they would fight for one port. Use --ntasks-per-node=1 with "
                "`shardclip-launch run`, or start the script with srun, one task a rank"
            )
    said = number(environ, names.SLURM["nnodes"])
    if in_step and said is not None and said != len(hosts):
        raise LaunchError(
            f"node counts disagree: the node list names {len(hosts)} hosts, Slurm says {said}; "
            "unset the SLURM_* variables that an outer job left"
        )
    addr, port = _master(environ)
    job = text(environ, names.SLURM["job"])
    step = text(environ, names.SLURM["step"]) if in_step else "batch"
    restart = number(environ, names.SLURM["restart"]) or 0
    return Hosts(
        "slurm",
        len(hosts),
        (number(environ, names.SLURM["node_rank"]) or 0) if in_step else 0,
        tuple(hosts),
        addr or hosts[0],
        port,
        f"{job}.{step}.{restart}",
        in_step,
    )


def _validate(found: Placement) -> None:
    if found.world_size < 1 or not 0 <= found.rank < found.world_size:
        raise LaunchError(
            f"{found.source} gives rank {found.rank} of {found.world_size}: rank must be below "
            "the world size; unset the variables that an outer launcher left"
        )
    if found.local_rank >= found.local_world_size:
        raise LaunchError(
            f"{found.source} gives local rank {found.local_rank} of {found.local_world_size} "
            "on this host: it must be below the number of ranks on the host"
        )
