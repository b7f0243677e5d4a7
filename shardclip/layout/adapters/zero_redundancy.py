"""DistributedDataParallel and ZeroRedundancyOptimizer: every rank has every gradient.

Only the optimizer is cut into shards. The gradients are copies, once DDP has averaged them.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import Placement, Replicate

from shardclip import compat


def layout(replicated: Any) -> tuple[Any, tuple[Placement, ...]]:
    """Return the ``layout=`` by which the ranks share the reading of gradients that are copies.

    Without it they are read in full on every rank; with it each of R ranks reads 1/R. ::

        clipper = GradClipper(model, 1.0, layout=zero_redundancy.layout(model))

    Args:
        replicated: A ``DistributedDataParallel`` module or a ``ZeroRedundancyOptimizer``: its
            ``process_group`` is read.

    Raises:
        TypeError: It has no process group.

    Communication:
        None.
    """
    group = getattr(replicated, "process_group", None)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "give a DistributedDataParallel module or a ZeroRedundancyOptimizer, got "
            f"{type(replicated).__name__}"
        )
    return compat.bare_mesh(sorted(dist.get_process_group_ranks(group))), (Replicate(),)
