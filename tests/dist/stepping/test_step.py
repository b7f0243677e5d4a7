"""start() and finish(), and the clipper's own step: the optimizer and the loss scaler included."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard

from shardclip import ClipResult, GradClipper, NonFiniteGradientError
from tests.ranks import count_collectives, everywhere, on_ranks, raised_everywhere
from tests.ranks.models import average_, loss_of, mlp
from tests.ranks.tensors import exact_norm, local_of, mesh_of
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce

MAX_NORM = 0.25
OPTIMIZERS = {
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "SGD fused": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
}
BY_OPTIMIZER = pytest.mark.parametrize("name", OPTIMIZERS)
LAYOUTS = pytest.mark.parametrize("layout", ["FSDP2", "plain"])


def model_of(layout: str) -> nn.Module:
    model = mlp()
    if layout == "FSDP2":
        fully_shard(model[1], mesh=mesh_of(2))
        fully_shard(model, mesh=mesh_of(2))
    return model


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (loss_of(model, dist.get_rank()) * factor).backward()
    for one in model.parameters():
        if type(one) is nn.Parameter:
            average_(one.grad)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [full(one.grad) for one in model.parameters()]


def values(model: nn.Module) -> list[torch.Tensor]:
    return [full(one) for one in model.parameters()]


def assert_close(found, expected, rtol=1e-6) -> None:
    """Values are around 1: two rounded steps part by some 1e-7, and so do the next gradients."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-7)


@LAYOUTS
@on_ranks(2)
def test_started_and_finished_with_work_in_between(layout):
    model = model_of(layout)
    clipper = GradClipper(model, MAX_NORM)
    for _ in range(3):
        model.zero_grad()
        backward(model)
        before = gradients(model)
        total = exact_norm(before)
        with count_collectives() as calls:
            pending = clipper.start()
            torch.randn(100, 100) @ torch.randn(100, 100)
            result = pending.finish()
        assert_one_all_reduce(calls)
        assert_norm(result.total_norm, total)
        assert result.clipped
        assert_close(gradients(model), [g * (MAX_NORM / total) for g in before], 1e-5)


@on_ranks(2)
def test_the_all_reduce_is_under_way_before_finish():
    """What is changed after start() no longer counts: the sums have left."""
    model = model_of("FSDP2")
    clipper = GradClipper(model, 1e9)
    backward(model)
    total = exact_norm(gradients(model))
    with count_collectives() as calls:
        pending = clipper.start()
    assert [call.op for call in calls] == ["all_reduce"]
    local_of(next(model.parameters()).grad).zero_()
    with count_collectives() as calls:
        result = pending.finish()
    assert calls == []
    assert_norm(result.total_norm, total)


@on_ranks(2)
def test_a_step_under_way_is_finished_once_and_before_the_next():
    model = model_of("FSDP2")
    clipper = GradClipper(model, 1e9)
    backward(model)
    pending = clipper.start()
    with pytest.raises(RuntimeError, match=r"finish\(\)"):
        clipper.clip_()
    pending.finish()
    with pytest.raises(RuntimeError, match="already called"):
        pending.finish()
    clipper.clip_()


@on_ranks(2)
def test_what_is_wrong_raises_in_finish_on_all_ranks_and_the_next_step_goes_on():
    model = model_of("FSDP2")
    clipper = GradClipper(model, 1e9, nonfinite="raise")
    backward(model)
    if dist.get_rank() == 1:
        local_of(next(model.parameters()).grad)[0] = math.nan
    pending = clipper.start()
    raised_everywhere(pending.finish, NonFiniteGradientError)
    model.zero_grad()
    backward(model)
    assert clipper.clip_().finite


@LAYOUTS
@BY_OPTIMIZER
@on_ranks(2)
def test_step_is_clip_and_step(layout, name):
    model, twin = model_of(layout), model_of(layout)
    optimizer, other = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    clipper, reference = GradClipper(model, MAX_NORM), GradClipper(twin, MAX_NORM)
    for _ in range(3):
        for one in (model, twin):
            one.zero_grad()
            backward(one)
        total = exact_norm(gradients(model))
        with count_collectives() as calls:
            result = clipper.step(optimizer)
        assert_one_all_reduce(calls)
        assert_norm(result.total_norm, total)
        assert result.clipped
        reference.clip_()
        # Only the fused kernel has a rule for DTensors; without it SGD takes its plain one.
        for group in other.param_groups:
            group["fused"] = group.get("fused") and not (name == "SGD fused" and layout == "FSDP2")
        other.step()
        assert_close(gradients(model), gradients(twin))
        assert_close(values(model), values(twin), 1e-5)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@on_ranks(2)
def test_no_pass_over_the_gradients_is_made_for_a_fused_optimizer():
    model = model_of("FSDP2")
    optimizer = OPTIMIZERS["AdamW fused"](model.parameters())
    clipper = GradClipper(model, MAX_NORM)
    backward(model)
    patch = pytest.MonkeyPatch()
    scaled = []

    def noted(targets, factor):
        scaled.extend(targets)

    patch.setattr("shardclip.step.cycle.scale_", noted)
    try:
        assert clipper.step(optimizer).clipped
    finally:
        patch.undo()
    assert scaled == []
    assert abs(exact_norm(gradients(model)) - MAX_NORM) < 1e-5


@on_ranks(2)
def test_several_optimizers_by_one_norm():
    model = model_of("FSDP2")
    parameters = list(model.parameters())
    fused = OPTIMIZERS["AdamW fused"](parameters[:3])
    plain = OPTIMIZERS["Adam"](parameters[3:-1])  # the last one is in neither, and is clipped too
    clipper = GradClipper(model, MAX_NORM)
    backward(model)
    before, start = gradients(model), values(model)
    total = exact_norm(before)
    with count_collectives() as calls:
        result = clipper.step([fused, plain])
    assert_one_all_reduce(calls)
    assert_norm(result.total_norm, total)
    assert_close(gradients(model), [g * (MAX_NORM / total) for g in before], 1e-5)
    moved = [not torch.equal(a, b) for a, b in zip(values(model), start, strict=True)]
    assert moved == [True] * (len(parameters) - 1) + [False]


@BY_OPTIMIZER
@on_ranks(2)
def test_a_skipped_step_changes_nothing(name):
    model = model_of("FSDP2")
    optimizer = OPTIMIZERS[name](model.parameters())
    clipper = GradClipper(model, MAX_NORM, nonfinite="skip")
    backward(model)
    clipper.step(optimizer)
    backward(model)
    if dist.get_rank() == 0:
        local_of(next(model.parameters()).grad)[0] = math.inf
    grads, start = gradients(model), values(model)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    result = clipper.step(optimizer)
    assert result.skipped
    assert clipper.skipped == 1
    assert all(map(torch.equal, gradients(model), grads))
    assert all(map(torch.equal, values(model), start))
    for key, held in optimizer.state_dict()["state"].items():
        for what, value in held.items():
            before = state[key][what]
            assert value is before or torch.equal(full(value), full(before)), (key, what)


def by_torch(model, optimizer, scaler, steps) -> list[torch.Tensor]:
    """The reference: unscale, clip by the true norm, step, update."""
    for spoiled in steps:
        optimizer.zero_grad()
        backward_scaled(model, scaler, spoiled)
        scaler.unscale_(optimizer)
        total = exact_norm(gradients(model))
        if math.isfinite(total):
            factor = min(1.0, MAX_NORM / (total + 1e-6))
            for one in model.parameters():
                local_of(one.grad).mul_(factor)
        scaler.step(optimizer)
        scaler.update()
    return values(model)


def backward_scaled(model, scaler, spoiled: bool) -> None:
    scaler.scale(loss_of(model, dist.get_rank())).backward()
    if spoiled and dist.get_rank() == 1:
        local_of(next(model.parameters()).grad)[0] = math.inf


@pytest.mark.parametrize("call", ["step", "clip_"])
@pytest.mark.parametrize("name", ["AdamW fused", "Adam", "SGD"])
@on_ranks(2)
def test_a_loss_scaler_is_folded_in(name, call):
    steps = [False, True, False, False]
    twin = model_of("FSDP2")
    options = {"init_scale": 1024.0, "growth_interval": 2}
    reference = GradScaler("cpu", **options)
    expected = by_torch(twin, OPTIMIZERS[name](twin.parameters()), reference, steps)
    model = model_of("FSDP2")
    optimizer, scaler = OPTIMIZERS[name](model.parameters()), GradScaler("cpu", **options)
    clipper = GradClipper(model, MAX_NORM)
    for spoiled in steps:
        optimizer.zero_grad()
        backward_scaled(model, scaler, spoiled)
        total = exact_norm(gradients(model)) / scaler.get_scale()
        with count_collectives() as calls:
            if call == "step":
                result = clipper.step(optimizer, grad_scaler=scaler)
            else:
                result = clipper.clip_(grad_scaler=scaler, optimizers=[optimizer])
        assert_one_all_reduce(calls)
        if call == "clip_":
            scaler.step(optimizer)
        assert_norm(result.total_norm, total)
        assert result.skipped is spoiled
        scaler.update()
    assert scaler.get_scale() == reference.get_scale()
    assert_close(values(model), expected, 1e-5)
    assert clipper.skipped == 1


@on_ranks(2)
def test_norms_are_those_of_the_unscaled_gradients():
    model = model_of("FSDP2")
    optimizer, scaler = OPTIMIZERS["SGD"](model.parameters()), GradScaler("cpu", init_scale=4096.0)
    clipper = GradClipper(model, MAX_NORM, norms="parameter")
    backward_scaled(model, scaler, spoiled=False)
    before = [g / 4096 for g in gradients(model)]
    result: ClipResult = clipper.clip_(grad_scaler=scaler, optimizers=[optimizer])
    for grad, found in zip(before, result.norms.values(), strict=True):
        assert abs(found - exact_norm([grad])) <= 1e-6 * exact_norm([grad])
    assert abs(result.clipped_norm - MAX_NORM) < 1e-5
    total = exact_norm(before)
    assert_close(gradients(model), [g * (MAX_NORM / total) for g in before], 1e-5)


@on_ranks(2)
def test_a_gradient_in_no_optimizer_raises_on_all_ranks():
    model = model_of("FSDP2")
    held = list(model.parameters())
    if dist.get_rank() == 1:
        held = held[1:]
    optimizer, scaler = torch.optim.SGD(held, lr=0.1), GradScaler("cpu", init_scale=8.0)
    clipper = GradClipper(model, MAX_NORM)
    backward_scaled(model, scaler, spoiled=False)
    before = gradients(model)
    raised_everywhere(lambda: clipper.step(optimizer, grad_scaler=scaler), ValueError, "optimizers")
    assert all(map(torch.equal, gradients(model), before))
    assert everywhere(True)
