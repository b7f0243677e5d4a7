"""FullyShardedDataParallel (FSDP1): the parameters inside its flat parameters.

FSDP1 pads flat parameters; the metadata of each shard tells which elements are whose, so padding is
never counted.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from shardclip.comm import World
from shardclip.layout.ownership import Ownership
from shardclip.layout.sources import Source, clean


def _wrapped(module: nn.Module) -> Iterator[tuple[str, Any]]:
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp is None:  # then no module can be one
        return
    for name, child in module.named_modules():
        if isinstance(child, fsdp) and child._handle is not None:
            yield name, child


def sources(module: nn.Module, world: World) -> list[Source]:
    """List the parameters that FSDP1 manages inside a module, one source each.

    Args:
        module: Any module, wrapped or with wrapped children.
        world: The ranks that reduce together.
    """
    found = []
    for prefix, wrapped in _wrapped(module):
        ownership = _ownership(wrapped, world)
        flat = wrapped._handle.flat_param
        for index, (fqn, info) in enumerate(zip(flat._fqns, flat._shard_param_infos, strict=True)):
            name = clean(f"{prefix}.{fqn}")
            begins = info.intra_param_start_idx or 0, tuple(flat._shapes[index])
            parameter, span = flat, None
            if flat._params is not None:  # use_orig_params: the gradient is this rank's part
                parameter = flat._params[index]
            else:
                start = info.offset_in_shard or 0
                span = (start, start + (info.numel_in_shard or 0))
            found.append(
                Source.named(name, parameter, span=span, ownership=ownership, begins=begins)
            )
    return found


def _ownership(wrapped: Any, world: World) -> Ownership:
    group = set(world.ranks)
    shard_ranks = dist.get_process_group_ranks(wrapped.process_group)
    if not wrapped._handle.uses_sharded_strategy:
        copies = tuple(sorted(set(shard_ranks) & group))
        return Ownership(copies, copies)
    between_hosts = getattr(wrapped, "_inter_node_pg", None)
    if between_hosts is None:
        return Ownership((world.rank,), tuple(sorted(shard_ranks)))
    copies = tuple(sorted(set(dist.get_process_group_ranks(between_hosts)) & group))
    return Ownership(copies, tuple(sorted(group)))
