"""What every framework wants of the process it runs in, and silence from it."""

import functools
import os
import warnings

import torch.distributed as dist

from tests.ranks import on_ranks as on_plain_ranks

OURS = r"(shardclip|tests)\.(?!systems\.megatron_on_cpu)"  # through which Megatron's calls go
OURS = r"(shardclip|tests)\.(?!systems\.megatron_on_cpu)"  # through which Megatron's calls go
FIRST_S = 300.0  # the first call imports the framework, and DeepSpeed compiles an extension


def prepare() -> None:
    """Set what launchers set; the process group is the pool's."""
    os.environ.update(
        RANK=str(dist.get_rank()),
        LOCAL_RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_WORLD_SIZE=str(dist.get_world_size()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        DS_ACCELERATOR="cpu",
    )


def on_ranks(world_size: int, **options):
    """Like the pool's; warnings of the frameworks are theirs, only shardclip's are errors."""

    def decorate(body):
        @functools.wraps(body)
        def quietly(**kwargs):
            prepare()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.filterwarnings("error", module=OURS)
                body(**kwargs)

        return on_plain_ranks(world_size, limit_s=FIRST_S, **options)(quietly)

    return decorate
