"""GradScaler's state after unscaling and clipping in one multiplication."""

import math

import pytest
import torch
from torch import nn, optim
from torch.amp import GradScaler

from shardclip.math import norm
from shardclip.step import loss_scaling
from shardclip.step.loss_scaling import (
    check_members,
    inverse_scale,
    mark_unscaled,
    resolve,
    step_with_scaler,
)
from shardclip.step.optimizers import factor_group
from shardclip.step.scale import scale_
from tests.kernels.accelerator import accelerator, no_host_sync

F = torch.tensor
CPU = torch.device("cpu")
MAX_NORM = 1.0

OPTIMIZERS = {
    "AdamW fused": lambda ps: optim.AdamW(ps, lr=0.1, fused=True),
    "AdamW": lambda ps: optim.AdamW(ps, lr=0.1),
    "Adagrad fused": lambda ps: optim.Adagrad(ps, lr=0.1, fused=True),
    "SGD fused": lambda ps: optim.SGD(ps, lr=0.1, fused=True),
    "SGD momentum fused": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "SGD dampening fused": lambda ps: optim.SGD(
        ps, lr=0.1, momentum=0.9, dampening=0.5, fused=True
    ),
    "SGD momentum": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9),
}


def started(**options) -> GradScaler:
    scaler = GradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 2, **options})
    scaler.scale(torch.ones(()))
    return scaler


def parameters(dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (3, 40)]


def give(params, seed: int, scale: float, bad: float | None = None) -> None:
    """Gradients of a scaled loss; one value of the first replaced."""
    generator = torch.Generator().manual_seed(100 + seed)
    size = (0.001, 2.0)[seed % 2]  # below and above the threshold
    for one in params:
        wide = torch.randn(one.shape, generator=generator, dtype=torch.float64) * size
        one.grad = (wide.float().double() * scale).to(one.dtype)
    if bad is not None:
        params[0].grad[1] = bad


def exact_norm(params) -> torch.Tensor:
    return torch.cat([one.grad.double().flatten() for one in params]).norm()


def clip_and_step(scaler, optimizers, params, into_step: bool) -> None:
    """What a clipper does: the norm of what is unscaled, one multiplication, the step."""
    scaler = resolve(scaler, optimizers)
    inverse = inverse_scale(scaler, optimizers, CPU)
    total = exact_norm(params) * inverse
    coef = norm.clip_coef(total, MAX_NORM) * inverse
    found = ~torch.isfinite(total)
    group_of = {id(one): 0 for one in params}
    takers = [one for one in optimizers if into_step and factor_group(one, group_of) is not None]
    taken = {id(p) for one in takers for group in one.param_groups for p in group["params"]}
    if not found:
        scale_([one.grad for one in params if id(one) not in taken], float(coef))
    for one in optimizers:
        step_with_scaler(scaler, one, found, coef if one in takers else None)


def torchs_clip_and_step(scaler, optimizers, params) -> None:
    for one in optimizers:
        scaler.unscale_(one)
    nn.utils.clip_grad_norm_(params, MAX_NORM)
    for one in optimizers:
        scaler.step(one)


def records(scaler) -> list[tuple]:
    return [
        (state["stage"].name, {str(d): (v.item(), v.dtype, v.shape) for d, v in found.items()})
        for state in scaler._per_optimizer_states.values()
        for found in [state["found_inf_per_device"]]
    ]


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_the_state_is_what_unscale_leaves(bad):
    ours, theirs = parameters(), parameters()
    mine, other = started(), started()
    optimizers = OPTIMIZERS["AdamW"](ours), OPTIMIZERS["AdamW"](theirs)
    give(ours, 0, 8.0, bad), give(theirs, 0, 8.0, bad)
    mark_unscaled(mine, optimizers[0], ~torch.isfinite(exact_norm(ours)))
    other.unscale_(optimizers[1])
    assert records(mine) == records(other)
    assert records(mine)[0][1]["cpu"][0] == (0.0 if bad is None else 1.0)
    step = [scaler.step(one) for scaler, one in zip((mine, other), optimizers, strict=True)]
    assert step == [None, None]
    assert records(mine) == records(other)


@pytest.mark.parametrize("into_step", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_as_torch_does(name, into_step):
    """Six steps, clipped and not, of which the third overflows: same scale, same parameters."""
    ours, theirs = parameters(), parameters()
    mine, other = OPTIMIZERS[name](ours), OPTIMIZERS[name](theirs)
    scalers = started(), started()
    scales = []
    for seed, bad in enumerate([None, None, math.inf, None, None, None]):
        before = [one.detach().clone() for one in ours]
        give(ours, seed, scalers[0].get_scale(), bad)
        give(theirs, seed, scalers[1].get_scale(), bad)
        raw = [one.grad.clone() for one in ours]
        clip_and_step(scalers[0], [mine], ours, into_step)
        torchs_clip_and_step(scalers[1], [other], theirs)
        assert records(scalers[0]) == records(scalers[1])
        for scaler in scalers:
            scaler.update()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        scales.append(scalers[0].get_scale())
        for one, two, was, grad in zip(ours, theirs, before, raw, strict=True):
            torch.testing.assert_close(one, two, rtol=2e-6, atol=1e-6)
            assert torch.equal(one, was) == (bad is not None)
            if bad is None:
                torch.testing.assert_close(one.grad, two.grad, rtol=5e-6, atol=0)
            else:
                assert torch.equal(one.grad, grad)  # untouched
    assert scales == [8.0, 16.0, 8.0, 8.0, 16.0, 16.0]
    assert not hasattr(mine, "grad_scale")


@pytest.mark.parametrize("into_step", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_as_float64_says(name, into_step):
    """The unsharded, unscaled answer in float64; the second step is clipped."""
    ours, exact = parameters(), parameters(torch.float64)
    mine, oracle = OPTIMIZERS[name](ours), OPTIMIZERS[name](exact)
    scaler = started(init_scale=1024.0)
    for seed in range(4):
        give(ours, seed, scaler.get_scale())
        for one, two in zip(ours, exact, strict=True):
            two.grad = one.grad.double() / scaler.get_scale()
        total = exact_norm(exact)
        assert (total > MAX_NORM) == (seed % 2 == 1)
        for one in exact:
            one.grad *= norm.clip_coef(total, MAX_NORM)
        clip_and_step(scaler, [mine], ours, into_step)
        scaler.update()
        oracle.step()
        for one, two in zip(ours, exact, strict=True):
            torch.testing.assert_close(one.grad.double(), two.grad, rtol=2.0**-22, atol=0)
            torch.testing.assert_close(one.double(), two, rtol=4e-6, atol=2e-6)


@pytest.fixture
def poisoned_memory():
    """Whatever torch.empty gives is NaN."""
    torch.use_deterministic_algorithms(True)  # fills it
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "fused" in name])
def test_an_overflow_in_the_first_step(name):
    """torch 2.13's fused SGD takes memory as it comes for the momentum then."""
    ours, theirs = parameters(), parameters()
    mine, other = OPTIMIZERS[name](ours), OPTIMIZERS[name](theirs)
    scaler = started()
    start = [one.detach().clone() for one in ours]
    give(ours, 0, 8.0, math.inf)
    clip_and_step(scaler, [mine], ours, into_step=True)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(one, was) for one, was in zip(ours, start, strict=True))
    assert not any(value.abs().max() > 0 for one in ours for value in mine.state[one].values())
    give(ours, 1, 4.0)
    clip_and_step(scaler, [mine], ours, into_step=True)
    scaler.update()
    give(theirs, 1, 1.0)
    nn.utils.clip_grad_norm_(theirs, MAX_NORM)
    other.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("into_step", [True, False])
def test_16_bit_gradients_are_rounded_once(into_step):
    (one,) = parameters(torch.bfloat16)[1:]
    give([one], 1, 65536.0)
    raw = one.grad.clone()
    scaler = started(init_scale=65536.0)
    optimizer = optim.AdamW([one], fused=into_step)
    clip_and_step(scaler, [optimizer], [one], into_step)
    total = (raw.double() / 65536).norm()
    assert total > MAX_NORM
    assert torch.equal(one.grad, (raw.double() / 65536 * MAX_NORM / (total + 1e-6)).bfloat16())


def test_several_optimizers_share_a_norm():
    """One that takes the factor and one that does not; an overflow in one stops both."""
    ours, theirs = parameters(), parameters()
    kinds = OPTIMIZERS["AdamW fused"], OPTIMIZERS["SGD momentum"]
    mine = [kind([one]) for kind, one in zip(kinds, ours, strict=True)]
    other = [kind([one]) for kind, one in zip(kinds, theirs, strict=True)]
    scalers = started(), started()
    for seed in (0, 1):
        give(ours, seed, scalers[0].get_scale()), give(theirs, seed, scalers[1].get_scale())
        clip_and_step(scalers[0], mine, ours, into_step=True)
        torchs_clip_and_step(scalers[1], other, theirs)
        assert records(scalers[0]) == records(scalers[1])
        [scaler.update() for scaler in scalers]
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, two, rtol=2e-6, atol=1e-6)
    before = [one.detach().clone() for one in ours]
    give(ours, 2, 16.0, math.inf)
    clip_and_step(scalers[0], mine, ours, into_step=True)
    assert [found["cpu"][0] for _, found in records(scalers[0])] == [1.0, 1.0]
    scalers[0].update()
    assert scalers[0].get_scale() == 8.0
    assert all(torch.equal(one, was) for one, was in zip(ours, before, strict=True))


def test_update_adds_up_what_was_found_in_place_but_not_in_the_callers_tensor():
    ours = parameters()
    optimizers = [optim.SGD([one]) for one in ours]
    scaler, found = started(), F(1.0)
    give(ours, 0, 8.0, math.inf)
    for one in optimizers:
        mark_unscaled(scaler, one, found)
    scaler.update()
    assert found == 1.0


def test_after_unscale_nothing_is_unscaled_again():
    ours = parameters()
    optimizer = OPTIMIZERS["AdamW fused"](ours)
    scaler = started()
    give(ours, 1, 8.0)
    expected = [one.grad / 8 for one in ours]
    scaler.unscale_(optimizer)
    assert resolve(scaler, [optimizer]) is scaler
    assert inverse_scale(scaler, [optimizer], CPU) == 1
    step_with_scaler(scaler, optimizer, F(False), F(1.0, dtype=torch.float64))
    for one, grad in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.grad, grad, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_what_unscale_found_is_kept(name):
    """Even where the user has mended the gradients since: torch skips such a step, too."""
    ours = parameters()
    optimizer = OPTIMIZERS[name](ours)
    scaler = started()
    give(ours, 1, 8.0, math.inf)
    scaler.unscale_(optimizer)
    for one in ours:
        one.grad.nan_to_num_(posinf=0.0)
    before = [one.detach().clone() for one in ours]
    clip_and_step(scaler, [optimizer], ours, into_step=True)
    assert all(torch.equal(one, was) for one, was in zip(ours, before, strict=True))
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_a_rank_without_gradients_records_what_the_others_found():
    """There torch's own step and update raise."""
    ours = parameters()
    for name in ("AdamW", "AdamW fused"):
        scaler, optimizer = started(), OPTIMIZERS[name](ours)
        step_with_scaler(scaler, optimizer, F(True))
        scaler.update()
        assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("unscaled", [False, True])
def test_on_an_accelerator_nothing_is_read(unscaled):
    with accelerator() as device:
        one = nn.Parameter(torch.ones(3, device=device))
        one.grad = torch.ones(3, device=device)
        optimizer = optim.AdamW([one], fused=True)
        scaler = GradScaler("cpu")  # "cuda" would look for one
        scaler.scale(torch.ones((), device=device))
        if unscaled:
            scaler.unscale_(optimizer)
        found = torch.zeros((), dtype=torch.bool, device=device)
        with no_host_sync():
            assert resolve(scaler, [optimizer]) is scaler
            coef = inverse_scale(scaler, [optimizer], device)
            step_with_scaler(scaler, optimizer, found, coef)
            scaler.update()


# What is refused


def test_a_disabled_scaler_is_none():
    assert resolve(GradScaler("cpu", enabled=False), []) is None
    assert resolve(None, []) is None


def test_arguments_that_are_no_scaler_and_no_optimizers():
    with pytest.raises(TypeError, match=r"grad_scaler is a float.*torch.amp.GradScaler"):
        resolve(8.0, [optim.SGD(parameters())])
    with pytest.raises(ValueError, match="needs the optimizers"):
        resolve(started(), [])


def test_a_norm_that_does_not_see_an_overflow():
    optimizers = [optim.SGD(parameters())]
    with pytest.raises(ValueError, match=r"norm_type=0 counts an infinity.*unscale_\(optimizer\)"):
        resolve(started(), optimizers, 0.0)
    assert resolve(GradScaler("cpu", enabled=False), optimizers, 0.0) is None


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_a_second_step_before_the_update(name):
    ours = parameters()
    optimizer = OPTIMIZERS[name](ours)
    scaler = started()
    give(ours, 0, 8.0)
    clip_and_step(scaler, [optimizer], ours, into_step=True)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last"):
        resolve(scaler, [optimizer])
    scaler.update()
    assert resolve(scaler, [optimizer]) is scaler


def test_optimizers_of_which_one_was_unscaled():
    ours = parameters()
    optimizers = [optim.SGD([one]) for one in ours]
    scaler = started()
    give(ours, 0, 8.0)
    scaler.unscale_(optimizers[0])
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on some"):
        resolve(scaler, optimizers)


def test_a_scaler_that_has_scaled_nothing():
    optimizer = optim.SGD(parameters())
    scaler = resolve(GradScaler("cpu"), [optimizer])
    with pytest.raises(RuntimeError, match=r"no scale yet.*torch.zeros"):
        inverse_scale(scaler, [optimizer], CPU)


@pytest.mark.parametrize("layout", ["no states", "no stage", "no enum", "other stages"])
def test_a_version_of_torch_that_keeps_its_state_elsewhere(layout, monkeypatch):
    optimizer = optim.SGD(parameters())
    scaler = started()
    if layout == "no states":
        del scaler._per_optimizer_states
    elif layout == "no stage":
        scaler._per_optimizer_states[id(optimizer)] = {"found_inf_per_device": {}}
    elif layout == "no enum":
        monkeypatch.setattr(loss_scaling, "_STAGES", None)
    else:
        scaler._per_optimizer_states[id(optimizer)]["stage"] = "ready"
    with pytest.raises(
        RuntimeError, match=rf"torch {torch.__version__}.*unscale_\(optimizer\)".replace("+", r"\+")
    ):
        resolve(scaler, [optimizer])


def test_a_gradient_that_no_optimizer_holds():
    ours = parameters()
    give(ours, 0, 8.0)
    optimizer = optim.SGD(ours)
    named = {id(one): f"layer{i}" for i, one in enumerate(ours)}
    check_members([optimizer], named)
    with pytest.raises(ValueError, match=r"layer1: .*in none of the optimizers"):
        check_members([optim.SGD(ours[:1])], named)
