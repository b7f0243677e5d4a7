"""Who is missing, when a collective has failed.

Nothing is noted on the usual path. Ranks whose all-reduce has failed sign a list in the job's
key-value store, wait a little for each other, and read who has signed.
"""

import re
import time

import torch.distributed as dist

from shardclip import compat
from shardclip.math import fingerprints

from .world import World

PATIENCE = 5.0
"""Seconds to wait for the other ranks, whose time-outs may have begun a little later."""

_PAUSE = 0.1

_NO_MEMORY = re.compile("out of memory|allocate memory|not enough memory", re.IGNORECASE)


def is_local(error: BaseException) -> bool:
    """Whether what a collective has raised is wrong on this rank, whatever the others do.

    No time is then spent on waiting for them: an error of the device that an earlier kernel has
    left, no memory for a buffer, a backend that lacks the operation.
    """
    own = (NotImplementedError, RecursionError), compat.device_errors()
    return isinstance(error, own) or _NO_MEMORY.search(str(error)) is not None


def explain(error: BaseException, world: World, what: str) -> str:
    """Describe a failed collective: which ranks did not take part, as far as can be told.

    Args:
        error: What the backend has said.
        world: Who should have taken part.
        what: In which collective.
    """
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    missing = _missing(world)
    if missing is None:
        who = "which ranks are missing cannot be told: the job's store does not answer"
    elif missing:
        names = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        who = (
            f"rank(s) {names} of {world.size} did not take part in it. They have stopped, hang "
            "elsewhere, or did not make this call: every rank of the group must, also one without "
            "gradients"
        )
    else:
        who = (
            "every rank has made the call, and it has failed on each. If the backend names no "
            "cause, look at the network, or allow more time (init_process_group(timeout=...))"
        )
    return f"{what} failed: {who}. The backend said: {said}"


def _missing(world: World) -> list[int] | None:
    """Sign the list, wait, and tell who has not; None where there is no list."""
    store = compat.default_store()
    if store is None:
        return None
    number = compat.sequence_number(world.process_group)
    prefix = f"shardclip/failed/{fingerprints.of(world.ranks)}/{number}"
    try:
        store.set(f"{prefix}/{world.rank}", "here")
        until = time.monotonic() + PATIENCE
        missing = list(world.ranks)
        while missing and time.monotonic() < until:
            missing = [rank for rank in missing if not store.check([f"{prefix}/{rank}"])]
            time.sleep(_PAUSE if missing else 0)
    except (RuntimeError, dist.DistError):  # the store's host may be the one that is gone
        return None
    return missing
