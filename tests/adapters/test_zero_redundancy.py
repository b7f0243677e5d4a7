"""torch's ZeroRedundancyOptimizer beside DDP: gradients are copies, only the optimizer is cut."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardclip import GradClipper, ReplicaMismatchError
from shardclip.layout.adapters import zero_redundancy
from shardclip.plan import plan
from tests.ranks import everywhere, on_ranks, raised_everywhere
from tests.ranks.clippers import counted
from tests.ranks.models import loss_of, mlp, unsharded_gradients
from tests.ranks.tensors import exact_norm
from tests.ranks.unsharded import CLIPS, assert_norm

with warnings.catch_warnings():  # importing it, torch warns of its own use of torch.jit
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

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


@pytest.mark.parametrize("of", ["ddp", "optimizer"])
@on_ranks(4)
def test_reading_is_split_among_the_ranks(of):
    model = DistributedDataParallel(mlp())
    optimizer = optimizer_of(model, bucket_view=False)
    layout = zero_redundancy.layout({"ddp": model, "optimizer": optimizer}[of])
    clipper = GradClipper(model, 1e9, layout=layout)
    loss_of(model, dist.get_rank()).backward()
    norm = counted(clipper).total_norm
    assert_norm(norm, exact_norm(unsharded_gradients(4).values()), rtol=1e-5)
    collector = clipper._collector
    local = plan.locals_of(collector._plan, [one.grad for one in model.parameters()])
    read = sum(part.numel() for part in plan.readings(collector._plan, local)[0])
    total = sum(one.numel() for one in model.parameters())
    assert sum(everywhere(read)) == total
    assert read < 0.5 * total


@on_ranks(2)
def test_unsynchronised_copies_are_found_with_the_layout_too():
    model = DistributedDataParallel(mlp())
    clipper = GradClipper(model, 1.0, layout=zero_redundancy.layout(model))
    with model.no_sync():
        loss_of(model, dist.get_rank()).backward()
    raised_everywhere(clipper.clip_, ReplicaMismatchError, "all_reduce")


def test_a_plain_module_is_rejected():
    with pytest.raises(TypeError, match=r"DistributedDataParallel module .* got Sequential"):
        zero_redundancy.layout(mlp())
