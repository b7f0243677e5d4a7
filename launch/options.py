"""What a user can choose, for a run and for a batch job."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunOptions:
    """The options of `shardclip-launch run` and `check`, by torchrun's names."""

    command: tuple[str, ...] = ()
    """The script and its own arguments."""
    nproc_per_node: int | None = None
    """Ranks on this host; None: one a device, without devices one a CPU."""
    nnodes: int | None = None
    """Hosts in the run; None: as the scheduler says, else 1."""
    node_rank: int | None = None
    """This host's place, 0 for the one that holds the store; None: as the scheduler says."""
    master_addr: str | None = None
    """An address of host 0 that every host reaches; None: as the scheduler says."""
    master_port: int | None = None
    """The store's port on host 0; None: found free there and published."""
    rdzv_backend: str = "static"
    """static, or c10d."""
    max_restarts: int = 0
    """Restarts by torchrun; retries are better left to the scheduler."""
    log_dir: str | None = None
    """Where a file a rank is written; None: the run directory."""
    tee: str = "0"
    """The ranks shown on screen: 0, all or none."""
    notice_signals: tuple[str, ...] = ("TERM", "USR1")
    """Signals that are passed to every rank as notices."""
    grace: float = 120.0
    """Seconds from TERM or INT until ranks that did not stop are killed."""
    join_timeout: float = 300.0
    """Seconds that the hosts wait for each other at the start."""
    host_timeout: float = 60.0
    """Seconds without a sign of life after which a host is given up."""
    module: bool = False
    """The script is a module's name, as in `python -m`."""
    no_python: bool = False
    """The script is a program, not run by python."""
    dry_run: bool = False
    """Print torchrun's command line and stop."""


@dataclass(frozen=True)
class BatchOptions:
    """The options of `shardclip-launch slurm`; sbatch's long names where sbatch has one."""

    command: tuple[str, ...] = ()
    """The script and its own arguments; empty: taken from sbatch's command line."""
    nodes: int = 2
    """Hosts."""
    launcher: str = "torchrun"
    """torchrun: one agent a host; srun: one task a rank, started by Slurm itself."""
    procs_per_node: int | None = None
    """Ranks a host; None: one a device under torchrun, 1 under srun."""
    sbatch: dict[str, str | None] = field(default_factory=dict)
    """sbatch's further long options, without dashes; None for one that takes no value."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables set for the ranks, beside those of the submitting shell."""
    python: str = "python3"
    """The interpreter on the hosts."""
    run_dir: str = "shardclip-runs"
    """Directory, shared by the hosts, under which each job has its own for logs and markers."""
    notice_signal: str = "USR1"
    """The signal by which Slurm announces the time limit."""
    grace: int = 120
    """Seconds before the time limit at which Slurm gives notice, and that ranks have to save."""
    max_requeues: int = 3
    """How often a job that saved and stopped is started again."""
    tee: str = "0"
    """The ranks shown in the job's output under torchrun: 0, all or none."""


SBATCH_OPTIONS = (
    "account", "array", "begin", "chdir", "comment", "constraint", "cpus-per-task", "dependency",
    "exclude", "exclusive", "gpus", "gpus-per-node", "gpus-per-task", "gres", "job-name",
    "licenses", "mail-type", "mail-user", "mem", "mem-per-cpu", "mem-per-gpu", "nodelist",
    "ntasks-per-node", "partition", "qos", "reservation", "time",
)  # fmt: skip
"""sbatch's long options that `shardclip-launch slurm` knows by name."""

SBATCH_FLAGS = frozenset({"exclusive"})
"""Those that may stand without a value."""
