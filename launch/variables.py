"""One table: what is meant, and the variables that say it under each launcher."""

from collections.abc import Mapping

from .errors import LaunchError

SLURM = {
    "job": ("SLURM_JOB_ID", "SLURM_JOBID"),
    "job_name": ("SLURM_JOB_NAME",),
    "step": ("SLURM_STEP_ID", "SLURM_STEPID"),
    "array_job": ("SLURM_ARRAY_JOB_ID",),
    "array_task": ("SLURM_ARRAY_TASK_ID",),
    "restart": ("SLURM_RESTART_COUNT",),
    # a step may run on fewer hosts than its job, so the step's own variables come first
    "hosts": ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "job_hosts": ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "nnodes": ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "node_rank": ("SLURM_NODEID",),
    "rank": ("SLURM_PROCID",),
    "local_rank": ("SLURM_LOCALID",),
    "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    "tasks_per_node": ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    "cpus_per_task": ("SLURM_CPUS_PER_TASK",),
}
"""Concept -> Slurm's names for it, the first that is set counts."""

TORCHRUN = {
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
    "node_rank": ("GROUP_RANK",),
    "nnodes": ("GROUP_WORLD_SIZE",),
}

OPEN_MPI = {
    "rank": ("OMPI_COMM_WORLD_RANK",),
    "world_size": ("OMPI_COMM_WORLD_SIZE",),
    "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
    "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
}

PMI = {
    "rank": ("PMI_RANK", "PMIX_RANK"),
    "world_size": ("PMI_SIZE",),
    "local_rank": ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"),
    "local_world_size": ("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"),
}

KUBERNETES = {
    "nnodes": ("PET_NNODES", "WORLD_SIZE"),
    "node_rank": ("PET_NODE_RANK", "RANK"),
    "procs_per_node": ("PET_NPROC_PER_NODE",),
    "master_addr": ("PET_MASTER_ADDR", "MASTER_ADDR"),
    "master_port": ("PET_MASTER_PORT", "MASTER_PORT"),
}
"""A PyTorchJob's pods: RANK and WORLD_SIZE number the pods, not processes."""

MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
RUN_DIR = "SHARDCLIP_RUN_DIR"
STOP_FILE = "SHARDCLIP_STOP_FILE"
MARKER = "SHARDCLIP_STOP_MARKER"
NOTICE_SIGNALS = "SHARDCLIP_NOTICE_SIGNALS"
HELD = "SHARDCLIP_HELD"
"""From a guard to its rank: the numbers of the signals to hold back, before the script runs."""


def text(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """Return the first of the named variables that is set and not empty."""
    for name in names:
        value = environ.get(name, "").strip()
        if value:
            return value
    return None


def number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Return the first of the named variables that is set, as a whole number."""
    for name in names:
        value = environ.get(name, "").strip()
        if not value:
            continue
        if not value.isdigit():
            raise LaunchError(f"{name}={value!r} is not a whole number; unset it or mend it")
        return int(value)
    return None
