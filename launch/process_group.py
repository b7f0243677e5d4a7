"""The process group, under whichever launcher the script was started."""

import os
import re
from datetime import timedelta

from . import variables as names
from .environment import Placement, detect
from .errors import LaunchError
from .network import refuse_loopback, refuse_port, resolve
from .rendezvous import direct_port
from .variables import text

_JOIN_PATIENCE = 300.0


def init_distributed(timeout: float | timedelta = 600.0, backend: str | None = None) -> Placement:
    """Join the process group of this run: torchrun's, srun's, mpirun's, a pod's, or alone.

    Also sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and
    this rank's CUDA device.

    Args:
        timeout: seconds after which a collective that a peer does not join fails. It is always
            set: the default of torch lets a run hang for half an hour, or, with some backends,
            for ever.
        backend: as `torch.distributed.init_process_group`; None: NCCL for CUDA tensors, Gloo for
            CPU tensors.

    Returns:
        This rank's place.

    Raises:
        LaunchError: variables that contradict each other, a head address that cannot serve, or
            no port to meet at; the message says what to set.

    Communication:
        The group's own set-up.
    """
    import torch  # noqa: PLC0415 - importing this file must not import torch
    import torch.distributed as dist  # noqa: PLC0415

    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise LaunchError(f"init_distributed: timeout {timeout} must be above 0 seconds")
    place = detect(os.environ)
    cuda = torch.cuda.is_available()
    if cuda:
        # a task may see all devices of its host, or its own alone
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    backend = backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo")
    _export(place)
    if place.world_size == 1 and place.source in {"none", "slurm"}:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
        return place
    place = _with_master(place)
    dist.init_process_group(backend, init_method="env://", timeout=limit)
    return place


def _export(place: Placement) -> None:
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
    )


def _with_master(place: Placement) -> Placement:
    """Settle where the ranks meet, unless torchrun has."""
    if place.source == "torchrun":
        return place
    if place.master_addr is None:
        if place.nnodes > 1:
            raise LaunchError(
                f"started by {place.source} on {place.nnodes} hosts without MASTER_ADDR: set it to "
                "an address of rank 0's host, and MASTER_PORT to a free port there"
            )
        os.environ[names.MASTER_ADDR] = "127.0.0.1"
    else:
        refuse_loopback(
            place.master_addr, [a for _, a in resolve(place.master_addr, 0)], place.nnodes
        )
        os.environ[names.MASTER_ADDR] = place.master_addr
    port = direct_port(place, os.environ.get(names.RUN_DIR), _run_id(), _JOIN_PATIENCE)
    refuse_port(port, names.MASTER_PORT)
    os.environ[names.MASTER_PORT] = str(port)
    return place


def _run_id() -> str:
    """Name the run, alike on its ranks and unlike any other."""
    parts = [text(os.environ, names.SLURM[part]) for part in ("job", "step", "restart")]
    if parts[0] is None:
        # mpirun's own name for the job
        parts = [text(os.environ, ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID"))]
    return re.sub(r"[^\w.]", "_", ".".join(part or "0" for part in parts))
