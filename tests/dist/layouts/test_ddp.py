"""DistributedDataParallel: plain gradients that are copies, once they are synchronised."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardclip import GradClipper, ReplicaMismatchError
from tests.ranks import on_ranks, raised_everywhere
from tests.ranks.models import loss_of, mlp, unsharded_gradients
from tests.ranks.tensors import exact_norm
from tests.ranks.unsharded import CLIPS, assert_norm

BOTH = pytest.mark.parametrize("clip", CLIPS)


@BOTH
@on_ranks(4)
def test_clips_like_its_twin(clip):
    model = DistributedDataParallel(mlp())
    loss_of(model, dist.get_rank()).backward()
    expected = unsharded_gradients(4)
    total = exact_norm(expected.values())
    assert_norm(CLIPS[clip](model, total / 4, 2.0), total, rtol=1e-5)
    for name, one in model.module.named_parameters():
        torch.testing.assert_close(one.grad, expected[name] / 4, rtol=1e-4, atol=1e-7)


@BOTH
@on_ranks(4)
def test_gradients_of_a_micro_batch_without_synchronisation_are_found(clip):
    model = DistributedDataParallel(mlp())
    with model.no_sync():
        loss_of(model, dist.get_rank()).backward()
    before = [one.grad.clone() for one in model.parameters()]
    raised_everywhere(
        lambda: CLIPS[clip](model, 1e-3, 2.0), ReplicaMismatchError, r"0\.weight", "all_reduce"
    )
    assert all(
        torch.equal(one.grad, old) for one, old in zip(model.parameters(), before, strict=True)
    )


@on_ranks(4)
def test_accumulation_is_clipped_once():
    model = DistributedDataParallel(mlp())
    clipper = GradClipper(model, 1e9)
    with model.no_sync():
        loss_of(model, dist.get_rank()).backward()
    loss_of(model, dist.get_rank()).backward()
    expected = 2 * exact_norm(unsharded_gradients(4).values())
    assert_norm(clipper.clip_().total_norm, expected, rtol=1e-5)
