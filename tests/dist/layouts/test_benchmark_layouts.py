"""The benchmark's gradients lie as the frameworks' own do."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.cases import Case, Shapes, build
from tests.ranks import on_ranks

BLOCK = ((6, 5), (7, 6), (7,))  # 4 ranks divide neither rows


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = nn.ParameterList(torch.zeros(shape) for shape in BLOCK)

    def forward(self):
        return torch.stack([one.square().sum() + one.sum() for one in self.held]).sum()


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, batch):
        return self.down(self.up(batch)) * 2


def same(grad, expected):
    """Placements, shapes and, in units of elements, where it lies in its storage."""
    assert tuple(grad.placements) == tuple(expected.placements)
    assert grad.shape == expected.shape
    assert grad.device_mesh.shape == expected.device_mesh.shape
    mine, theirs = grad._local_tensor, expected._local_tensor
    assert mine.shape == theirs.shape
    assert mine.stride() == theirs.stride()


def storage(grads):
    """Who shares memory with whom, and at which offsets."""
    pointers = [grad._local_tensor.untyped_storage().data_ptr() for grad in grads]
    return [
        (pointers.index(p), g._local_tensor.storage_offset())
        for p, g in zip(pointers, grads, strict=True)
    ]


@pytest.mark.parametrize("layout, mesh", [("fsdp2", (4,)), ("hsdp", (2, 2))])
@on_ranks(4)
def test_as_fully_shard_leaves_them(layout, mesh):
    block = Block()
    names = ("dp_shard",) if len(mesh) == 1 else ("dp_replicate", "dp_shard")
    fully_shard(block, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
    block().backward()
    made = build(Case(layout, Shapes("s", "s", (BLOCK,))), seed=0)
    theirs = [one.grad for one in block.parameters()]
    ours = [one.grad for one in made.parameters]
    for grad, expected in zip(ours, theirs, strict=True):
        same(grad, expected)
    assert storage(ours) == storage(theirs)


@on_ranks(4)
def test_as_tensor_parallel_and_fully_shard_leave_them():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = FeedForward()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"])
    model(torch.ones(2, 8)).sum().backward()
    made = build(Case("fsdp-tp", Shapes("s", "s", (((12, 8), (8, 12)),))), seed=0)
    theirs = [one.grad for one in model.parameters()]
    ours = [one.grad for one in made.parameters]
    for grad, expected in zip(ours, theirs, strict=True):
        same(grad, expected)
    assert storage(ours) == storage(theirs)
