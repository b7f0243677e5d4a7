"""Gradients on the CPU while the group reduces elsewhere: only the small payload moves."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from shardclip import compat
from shardclip.comm import reduce
from shardclip.copies import proof
from shardclip.kernels import foreach
from shardclip.step import scale
from tests.ranks import on_ranks
from tests.ranks.models import loss_of, mlp, unsharded_gradients
from tests.ranks.tensors import exact_norm, mesh_of, parameter
from tests.ranks.unsharded import CLIPS, assert_norm

BOTH = pytest.mark.parametrize("clip", CLIPS)


@BOTH
@on_ranks(4)
def test_fsdp2_with_cpu_offload(clip):
    mesh = mesh_of(4)
    model = mlp()
    policy = CPUOffloadPolicy(pin_memory=False)  # pinning wants an accelerator
    fully_shard(model[1], mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    loss_of(model, dist.get_rank()).backward()
    expected = unsharded_gradients(4)
    total = exact_norm(expected.values())
    assert_norm(CLIPS[clip](model, total / 4, 2.0), total, rtol=1e-5)
    for name, one in model.named_parameters():
        assert one.grad.to_local().device.type == "cpu"
        torch.testing.assert_close(one.grad.full_tensor(), expected[name] / 4, rtol=1e-4, atol=1e-6)


@BOTH
@on_ranks(2)
def test_only_the_payload_moves_to_the_groups_device(clip):
    """A group on "cpu:0", to torch another device than "cpu", stands for an accelerator's."""
    moved: list[int] = []
    plain_move, plain_resolve = compat.to_device, reduce.resolve

    def move(tensor, device):
        if tensor.device != device:
            moved.append(tensor.numel())
        return plain_move(tensor, device)

    with pytest.MonkeyPatch.context() as patch:
        for module in (compat, compat.devices, proof, scale, foreach):
            patch.setattr(module, "to_device", move)
        elsewhere = torch.device("cpu", 0)
        patch.setattr(
            reduce, "resolve", lambda group: replace(plain_resolve(group), device=elsewhere)
        )
        grads = [torch.full((50_000,), 3.0), torch.full((50_000,), 4.0)]
        made = [parameter(grad.clone()) for grad in grads]
        norm = CLIPS[clip](made, 1.0, 2.0)
    total = exact_norm(grads)
    assert_norm(norm, total)
    assert moved
    assert max(moved) < 10_000  # the proof's table of signs; the gradients stay where they are
    for one, grad in zip(made, grads, strict=True):
        torch.testing.assert_close(one.grad, grad / total, rtol=1e-5, atol=0)
