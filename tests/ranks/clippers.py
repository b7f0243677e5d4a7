"""What the clipper's tests are built from: small parameters and a counted step."""

import torch
import torch.distributed as dist
from torch import nn

from shardclip import ClipResult, GradClipper

from .collectives import count_collectives
from .tensors import S0, mesh_of, parameter, sharded
from .unsharded import assert_one_all_reduce


def shard(values, mesh=None) -> nn.Parameter:
    return parameter(sharded(torch.tensor(values), mesh or mesh_of(2), [S0]))


def here(*values):
    """This rank's own of the values by rank."""
    return values[dist.get_rank()]


def counted(clipper: GradClipper, *args, **options) -> ClipResult:
    with count_collectives() as calls:
        result = clipper.clip_(*args, **options)
    assert_one_all_reduce(calls)
    return result


def weights() -> list[nn.Parameter]:
    return [shard([3.0, 4.0]), shard([5.0, 12.0]), shard([8.0, 15.0])]
