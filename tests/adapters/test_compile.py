"""torch.compile: modules compiled before or after sharding have the same gradients and names."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardclip import GradClipper
from tests.ranks import on_ranks
from tests.ranks.models import loss_of, mlp, unsharded_gradients
from tests.ranks.tensors import exact_norm, local_of, mesh_of
from tests.ranks.unsharded import CLIPS, assert_norm

BOTH = pytest.mark.parametrize("clip", CLIPS)


def compiled(model):
    return torch.compile(model, backend="aot_eager")


def backward(model) -> None:
    with warnings.catch_warnings():  # torch's compiler warns of itself
        warnings.simplefilter("ignore")
        loss_of(model, dist.get_rank()).backward()


def assert_clips_like_its_twin(model, clip) -> None:
    backward(model)
    expected = unsharded_gradients(2)
    total = exact_norm(expected.values())
    assert_norm(CLIPS[clip](model, total / 4, 2.0), total, rtol=1e-5)
    named = {
        name.replace("_orig_mod.", "").removeprefix("module."): p
        for name, p in model.named_parameters()
    }
    assert named.keys() == expected.keys()
    for name, one in named.items():
        full = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
        torch.testing.assert_close(full, expected[name] / 4, rtol=1e-4, atol=1e-6)


@BOTH
@on_ranks(2)
def test_fsdp2(clip):
    model = mlp()
    model[1] = fully_shard(compiled(model[1]), mesh=mesh_of(2))
    assert_clips_like_its_twin(fully_shard(model, mesh=mesh_of(2)), clip)


@BOTH
@on_ranks(2)
def test_ddp(clip):
    assert_clips_like_its_twin(compiled(DistributedDataParallel(mlp())), clip)


@on_ranks(2)
def test_norms_have_the_names_of_the_plain_module():
    model = compiled(fully_shard(mlp(), mesh=mesh_of(2)))
    backward(model)
    norms = GradClipper(model, 1e9, norms="parameter").clip_().norms
    assert norms.keys() == unsharded_gradients(2).keys()


@BOTH
@on_ranks(2)
def test_mixed_precision(clip):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = compiled(fully_shard(mlp(), mesh=mesh_of(2), mp_policy=policy))
    backward(model)
    before = [one.grad.full_tensor() for one in model.parameters()]
    total = exact_norm(before)
    assert total == pytest.approx(exact_norm(unsharded_gradients(2).values()), rel=3e-2)
    assert_norm(CLIPS[clip](model, total / 4, 2.0), total)
    for one, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), old / 4, rtol=1e-5, atol=0)
    assert local_of(one.grad).dtype == torch.float32
