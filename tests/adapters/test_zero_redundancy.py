"""torch's ZeroRedundancyOptimizer beside DDP: gradients are copies, only the optimizer is cut."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from shardclip import GradClipper
from tests.ranks import everywhere, on_ranks
from tests.ranks.clippers import counted
from tests.ranks.models import loss_of, mlp, unsharded_gradients
from tests.ranks.tensors import exact_norm
from tests.ranks.unsharded import CLIPS, assert_norm

BOTH = pytest.mark.parametrize("clip", CLIPS)


def optimizer_of(model, bucket_view: bool) -> ZeroRedundancyOptimizer:
    """Two param groups; on four ranks some hold nothing of one of them."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    made = ZeroRedundancyOptimizer(
        weights, torch.optim.SGD, lr=1.0, parameters_as_bucket_view=bucket_view
    )
    made.add_param_group({"params": [p for p in model.parameters() if p.ndim == 1], "lr": 1.0})
    return made


@BOTH
@pytest.mark.parametrize("bucket_view", [False, True])
@on_ranks(4)
def test_clips_like_the_unsharded_model(clip, bucket_view):
    model = DistributedDataParallel(mlp())
    optimizer = optimizer_of(model, bucket_view)
    held = [sum(map(len, (g["params"] for g in optimizer.optim.param_groups)))]
    assert sum(everywhere(held[0])) == len(list(model.parameters()))
    with model.no_sync():
        loss_of(model, dist.get_rank()).backward()
    loss_of(model, dist.get_rank()).backward()  # the second of two equal micro-batches
    expected = {name: 2 * grad for name, grad in unsharded_gradients(4).items()}
    total = exact_norm(expected.values())
    before = {name: one.detach().clone() for name, one in model.module.named_parameters()}
    assert_norm(CLIPS[clip](model, total / 4, 2.0), total, rtol=1e-5)
    optimizer.step()
    for name, one in model.module.named_parameters():
        moved = before[name] - one.detach()
        torch.testing.assert_close(moved, expected[name] / 4, rtol=1e-4, atol=1e-6)


@on_ranks(4)
def test_reading_is_split_among_the_ranks():
    """Each rank reads a part of what is a copy; the ends of the loop stay as they are."""
    model = DistributedDataParallel(mlp())
    optimizer = optimizer_of(model, bucket_view=False)
    clipper = GradClipper(model, 1e9)
    loss_of(model, dist.get_rank()).backward()
    counted(clipper)
    result = clipper.step(optimizer)
    assert_norm(result.total_norm, exact_norm(unsharded_gradients(4).values()), rtol=1e-5)
    total = sum(one.numel() for one in model.parameters())
    read = sum(seat_elements(clipper))
    assert sum(everywhere(read)) == total
    assert read < 0.6 * total


def seat_elements(clipper) -> list[int]:
    """How many elements this rank reads of each gradient."""
    from shardclip.plan import locals_of, readings

    plan = clipper._plan
    grads = clipper._gradients()
    parts, _ = readings(plan, locals_of(plan, grads))
    return [part.numel() for part in parts]
