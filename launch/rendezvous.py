"""Where the hosts of a run meet: the head's address and a port that was bound there."""

import os
import time
from pathlib import Path

from .environment import Placement
from .errors import HostLostError, LaunchError
from .network import free_port, refuse_loopback, refuse_occupied, resolve
from .plan import Plan
from .records import write_whole


def settle_port(plan: Plan, patience: float) -> int:
    """Return the store's port on the head; the same on all hosts.

    The head takes the port it was given, or binds a free one and publishes it in the run's
    directory; the other hosts read it there.

    Raises:
        LaunchError: the head's address or port cannot serve; the message says what to do.
        HostLostError: the head did not publish a port in time.
    """
    addresses = [address for _, address in resolve(plan.master_addr, 0)]
    refuse_loopback(plan.master_addr, addresses, plan.nnodes)
    if plan.node_rank == 0:
        if plan.master_port is not None:
            refuse_occupied(plan.master_port)
            return plan.master_port
        port = free_port()
        if plan.nnodes > 1:
            write_whole(_published(plan), f"{port}\n")
        return port
    return plan.master_port or _read_port(plan, patience)


def _published(plan: Plan) -> Path:
    return plan.run_dir / f"port-{plan.run_id}"


def _read_port(plan: Plan, patience: float) -> int:
    port = _wait_for_port(_published(plan), patience)
    if port is None:
        raise HostLostError(
            f"host {plan.host_name(0)} published no port in {_published(plan)} within "
            f"{patience:g} s: it did not start, or this directory is not shared by the hosts; set "
            "SHARDCLIP_RUN_DIR to one that is, or give --master-port"
        )
    return port


def _wait_for_port(path: Path, patience: float) -> int | None:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            # a listing makes network file systems look again
            if path.name in os.listdir(path.parent):
                return int(path.read_text())
        except (FileNotFoundError, ValueError):
            pass
        time.sleep(0.2)
    return None


def direct_port(place: Placement, directory: str | None, run_id: str, patience: float) -> int:
    """Return the store's port for ranks that srun or mpirun started, perhaps without one.

    Rank 0 binds a free port and publishes it in a directory that the hosts share.

    Args:
        place: this rank's.
        directory: the shared directory; None: one below the working directory.
        run_id: no other run in the directory has it.
        patience: seconds to wait for rank 0.

    Raises:
        LaunchError: no port came in time; the message says what to set.
    """
    if place.master_port is not None:
        return place.master_port
    if place.world_size == 1:
        return free_port()
    path = (Path(directory or "shardclip-runs") / f"port-{run_id}").absolute()
    if place.rank == 0:
        port = free_port()
        write_whole(path, f"{port}\n")
        return port
    found = _wait_for_port(path, patience)
    if found is None:
        raise LaunchError(
            f"rank 0 published no port in {path} within {patience:g} s; set MASTER_PORT, or "
            "SHARDCLIP_RUN_DIR to a directory that the hosts share"
        )
    return found
