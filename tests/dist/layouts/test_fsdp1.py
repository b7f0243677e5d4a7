"""FullyShardedDataParallel: every strategy gives the norm of the unsharded model."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from shardclip import GradClipper, ReplicaMismatchError, clip_grad_norm_
from tests.ranks import everywhere, on_ranks, raised_everywhere
from tests.ranks.models import average_, loss_of, mlp, unsharded_gradients
from tests.ranks.tensors import exact_norm, mesh_of
from tests.ranks.unsharded import CLIPS, assert_norm
from tests.ranks.warned import recorded

FSDP = FullyShardedDataParallel
BOTH = pytest.mark.parametrize("clip", CLIPS)
STRATEGIES = pytest.mark.parametrize(
    "strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
)
ORIGINAL = pytest.mark.parametrize("original", [True, False])


def wrapped(strategy: str, original: bool, model: nn.Module | None = None, ignored=()) -> FSDP:
    """The model with its inner block wrapped on its own, then as a whole; after a backward."""
    model = mlp() if model is None else model
    options = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": original,
        "device_id": torch.device("cpu"),
    }
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = mesh_of(2, 2, names=("replicate", "shard"))
    with recorded() as messages:  # NO_SHARD is deprecated
        model[1] = FSDP(model[1], **options)
        model = FSDP(model, ignored_states=ignored or None, **options)
    assert all("NO_SHARD" in message for message in messages), messages
    loss_of(model, dist.get_rank()).backward()
    return model


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def assert_scaled(model: nn.Module, before: list[torch.Tensor], factor: float) -> None:
    for now, old in zip(local_gradients(model), before, strict=True):
        torch.testing.assert_close(now, old * factor, rtol=1e-5, atol=0)
    assert any(everywhere(any(old.count_nonzero() > 0 for old in before)))


@STRATEGIES
@ORIGINAL
@BOTH
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@on_ranks(4)
def test_every_strategy_gives_the_unsharded_norm(strategy, original, clip, norm_type):
    expected = exact_norm(unsharded_gradients(4).values(), norm_type)
    model = wrapped(strategy, original)
    before = [grad.clone() for grad in local_gradients(model)]
    norm = CLIPS[clip](model, expected / 2, norm_type)
    assert_norm(norm, expected, rtol=1e-5)
    assert_scaled(model, before, 0.5)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ORIGINAL
@BOTH
@on_ranks(2)
def test_two_by_two_layer(strategy, original, clip):
    """Weight gradient rows [3, 4] and [3, 4] (pytorch #88621)."""
    with recorded():
        model = FSDP(
            nn.Linear(2, 2, bias=False),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=original,
            device_id=torch.device("cpu"),
        )
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert_norm(CLIPS[clip](model, 1.0, 2.0), math.sqrt(50), rtol=1e-6)
    flat = torch.cat([grad.flatten() for grad in local_gradients(model)])
    torch.testing.assert_close(flat[:2], torch.tensor([3.0, 4.0]) / math.sqrt(50))


@BOTH
@on_ranks(4)
def test_zeroth_norm_counts_elements(clip):
    expected = exact_norm(unsharded_gradients(4).values(), 0)
    assert_norm(CLIPS[clip](wrapped("FULL_SHARD", True), 1e9, 0.0), expected)


@BOTH
@on_ranks(4)
def test_padding_does_not_count(clip):
    """The inner block's 42 elements lie as 4 x 11: rank 3 holds two that belong to nobody."""
    model = wrapped("FULL_SHARD", False)
    expected = exact_norm(unsharded_gradients(4).values())
    (flat,) = model[1].parameters()
    assert flat.grad.numel() == 11
    if dist.get_rank() == 3:
        flat.grad[-2:] = 1e6
    assert_norm(CLIPS[clip](model, 1e9, 2.0), expected, rtol=1e-5)


@STRATEGIES
@ORIGINAL
@BOTH
@on_ranks(4)
def test_ignored_parameters_are_copies_once_they_are_synchronised(strategy, original, clip):
    plain = mlp()
    ignored = [plain[3].weight, plain[3].bias]
    model = wrapped(strategy, original, plain, ignored)
    for one in ignored:
        average_(one.grad)
    expected = exact_norm(unsharded_gradients(4).values())
    before = [grad.clone() for grad in local_gradients(model)]
    assert_norm(CLIPS[clip](model, expected / 2, 2.0), expected, rtol=1e-5)
    assert_scaled(model, before, 0.5)


@ORIGINAL
@BOTH
@on_ranks(4)
def test_ignored_parameters_that_nobody_reduces_are_found(original, clip):
    plain = mlp()
    model = wrapped("FULL_SHARD", original, plain, [plain[3].weight])
    before = [grad.clone() for grad in local_gradients(model)]
    raised_everywhere(
        lambda: CLIPS[clip](model, 1e-3, 2.0), ReplicaMismatchError, r"3\.weight", "all_reduce"
    )
    assert_scaled(model, before, 1.0)


@ORIGINAL
@BOTH
@on_ranks(4)
def test_a_wrapped_part_of_a_plain_model(original, clip):
    """The root itself is no FSDP module; what lies outside is plain and synchronised by hand."""
    model = mlp()
    model[1] = FSDP(model[1], use_orig_params=original, device_id=torch.device("cpu"))
    loss_of(model, dist.get_rank()).backward()
    for index in (0, 2, 3):
        for one in model[index].parameters():
            average_(one.grad)
    expected = exact_norm(unsharded_gradients(4).values())
    assert_norm(CLIPS[clip](model, expected / 2, 2.0), expected, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
@ORIGINAL
@pytest.mark.parametrize("as_list", [True, False])
@on_ranks(4)
def test_parameters_without_their_module_are_never_silently_wrong(strategy, original, as_list):
    model = wrapped(strategy, original)
    before = [grad.clone() for grad in local_gradients(model)]

    def call():
        parameters = model.parameters()
        clip_grad_norm_(list(parameters) if as_list else parameters, 1e-3)

    message = raised_everywhere(call, (ValueError, TypeError, RuntimeError))
    assert "FSDP" in message
    assert "module" in message
    assert_scaled(model, before, 1.0)


@on_ranks(4)
def test_norms_by_name_are_those_of_the_unsharded_model():
    expected = {name: exact_norm([grad]) for name, grad in unsharded_gradients(4).items()}
    model = wrapped("FULL_SHARD", True)
    norms = GradClipper(model, 1e9, norms="parameter").clip_().norms
    assert {name: float(norm) for name, norm in norms.items()} == {
        name: pytest.approx(norm, rel=1e-5) for name, norm in expected.items()
    }


@ORIGINAL
@on_ranks(4)
def test_steps_as_the_unsharded_model_does(original):
    """Three steps of clipper and optimizer; the losses agree."""
    twin, model = mlp(), wrapped("FULL_SHARD", original)
    clipper = GradClipper(model, 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for step in range(3):
        if step:
            loss_of(model, dist.get_rank()).backward()
        unsharded_gradients(4, twin)
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        result = clipper.step(optimizer)
        assert result.clipped
        assert_norm(result.total_norm, expected.item(), rtol=1e-4)
        twin_optimizer.step()
        optimizer.zero_grad()
        twin_optimizer.zero_grad()
    with FSDP.summon_full_params(model):
        now = dict(twin.named_parameters())
        for name, one in model.named_parameters() if original else []:
            plain = name.replace("_fsdp_wrapped_module.", "")
            torch.testing.assert_close(one, now[plain], rtol=1e-3, atol=1e-5)
