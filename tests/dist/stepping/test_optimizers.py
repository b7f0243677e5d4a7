"""The factor inside the optimizer's step and GradScaler's state, on two ranks."""

import math
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import distribute_tensor

from shardclip import get_total_norm
from shardclip.compat import local_tensors
from shardclip.math import norm
from shardclip.step.loss_scaling import inverse_scale, mark_unscaled, resolve, step_with_scaler
from shardclip.step.optimizers import factor_group, step_plain, step_scaled
from shardclip.step.scale import scale_
from tests.ranks import count_collectives, everywhere, on_ranks, same_everywhere
from tests.ranks.models import loss_of, mlp
from tests.ranks.tensors import exact_norm, local_of, mesh_of

OPTIMIZERS = {
    "Adam": lambda ps, **k: optim.Adam(ps, lr=0.1, weight_decay=0.01, **k),
    "AdamW": lambda ps, **k: optim.AdamW(ps, lr=0.1, **k),
    "SGD": lambda ps, **k: optim.SGD(ps, lr=0.1, momentum=0.9, **k),
    "Adagrad": lambda ps, **k: optim.Adagrad(ps, lr=0.1, **k),
}
SCALERS = {"GradScaler": GradScaler, "ShardedGradScaler": ShardedGradScaler}
MAX_NORM = 0.5


def model_of(layout: str) -> nn.Module:
    """FSDP2's DTensors, or plain copies on both ranks."""
    model = mlp()
    if layout == "FSDP2":
        fully_shard(model[1], mesh=mesh_of(2))
        fully_shard(model, mesh=mesh_of(2))
    return model


def backward(model: nn.Module, scale: float = 1.0, size: float = 1.0) -> None:
    (loss_of(model, dist.get_rank()) * scale * size).backward()
    for one in model.parameters():
        if type(one) is nn.Parameter:
            dist.all_reduce(one.grad)
            one.grad /= 2


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def values(model: nn.Module) -> list[Tensor]:
    return [full(one) for one in model.parameters()]


def grads_of(model: nn.Module) -> list[Tensor]:
    return [one.grad for one in model.parameters()]


def coef_of(model: nn.Module, inverse: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """The unscaled norm in float64, and what unscales and clips."""
    total = get_total_norm(grads_of(model)).double() * inverse
    return total, norm.clip_coef(total, MAX_NORM) * inverse


def group_of(model: nn.Module) -> dict[int, int]:
    return {id(one): 0 for one in model.parameters()}


@pytest.mark.parametrize("layout", ["FSDP2", "plain"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_steps_like_the_unsharded_model_in_float64(name, layout):
    """Whether the factor goes into the step or, as for SGD and Adagrad on DTensors, cannot."""
    model = model_of(layout)
    optimizer = OPTIMIZERS[name](model.parameters(), fused=True)
    exact = [nn.Parameter(one.double()) for one in values(model)]
    oracle = OPTIMIZERS[name](exact)
    taken = []
    for size in (3.0, 1e-3, 1.0):
        optimizer.zero_grad()
        backward(model, size=size)
        for one, grad in zip(exact, grads_of(model), strict=True):
            one.grad = full(grad).double()
        total, coef = coef_of(model)
        assert total.item() == pytest.approx(exact_norm([one.grad for one in exact]), rel=1e-6)
        assert (coef < 1) == (size >= 1)
        group = factor_group(optimizer, group_of(model))
        taken.append(group is not None)
        with count_collectives() as calls:
            if group is None:
                scale_(local_tensors(grads_of(model)), float(coef))
                step_plain(optimizer)
            else:
                step_scaled(optimizer, coef)
        assert calls == []
        for one in exact:
            one.grad *= coef
        oracle.step()
        for mine, other in zip(model.parameters(), exact, strict=True):
            torch.testing.assert_close(full(mine.grad).double(), other.grad, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(full(mine).double(), other, rtol=1e-5, atol=2e-6)
    if layout == "FSDP2":
        assert taken == [name in ("Adam", "AdamW")] * 3
    else:
        assert taken == [name != "SGD", True, True]  # its first step makes the momentum
    assert vars(optimizer).keys().isdisjoint({"grad_scale", "found_inf"})
    assert optimizer._step_supports_amp_scaling
    assert optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("layout", ["FSDP2", "plain"])
@on_ranks(2)
def test_the_difference_to_scaling_first_is_four_roundings(layout):
    ours, theirs = model_of(layout), model_of(layout)
    backward(ours), backward(theirs)
    _, coef = coef_of(ours)
    assert coef < 1
    step_scaled(optim.AdamW(ours.parameters(), fused=True), coef)
    scale_(local_tensors(grads_of(theirs)), float(coef))
    for mine, other in zip(grads_of(ours), grads_of(theirs), strict=True):
        torch.testing.assert_close(local_of(mine), local_of(other), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("layout", ["FSDP2", "plain"])
@pytest.mark.parametrize("found_inf", [None, False])
@on_ranks(2)
def test_a_coefficient_of_one_changes_no_bit(layout, found_inf):
    ours, theirs = model_of(layout), model_of(layout)
    backward(ours), backward(theirs)
    found = None if found_inf is None else torch.tensor(found_inf)
    step_scaled(
        optim.AdamW(ours.parameters(), fused=True), torch.ones((), dtype=torch.float64), found
    )
    optim.AdamW(theirs.parameters(), fused=True).step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(local_of(mine), local_of(other))
        assert torch.equal(local_of(mine.grad), local_of(other.grad))


@pytest.mark.parametrize("layout", ["FSDP2", "plain"])
@on_ranks(2)
def test_found_inf_from_the_one_all_reduce_stops_every_rank(layout):
    model = model_of(layout)
    optimizer = optim.AdamW(model.parameters(), fused=True)
    backward(model)
    if dist.get_rank() == 1:
        local_of(model[0].weight.grad).view(-1)[0] = math.nan
    before = values(model), [local_of(grad).clone() for grad in grads_of(model)]
    total, coef = coef_of(model)
    step_scaled(optimizer, coef, ~torch.isfinite(total))
    for was, now in zip(before[0], values(model), strict=True):
        assert torch.equal(was, now)
    for was, now in zip(before[1], grads_of(model), strict=True):
        torch.testing.assert_close(was, local_of(now), rtol=0, atol=0, equal_nan=True)
    assert all(optimizer.state[one]["step"] == 0 for one in model.parameters())


# Loss scaling


def clip_and_step(scaler, optimizers, model, into_step: bool) -> None:
    """What a clipper does: the norm of what is unscaled, one multiplication, the step."""
    scaler = resolve(scaler, optimizers)
    inverse = inverse_scale(scaler, optimizers, torch.device("cpu"))
    total, coef = coef_of(model, inverse)
    found = ~torch.isfinite(total)
    ids = group_of(model)
    takers = [one for one in optimizers if into_step and factor_group(one, ids) is not None]
    taken = {id(p) for one in takers for group in one.param_groups for p in group["params"]}
    rest = [one.grad for one in model.parameters() if id(one) not in taken and one.grad is not None]
    if not found:
        scale_(local_tensors(rest), float(coef))
    with count_collectives() as calls:
        for one in optimizers:
            step_with_scaler(scaler, one, found, coef if one in takers else None)
    assert calls == []


def recorded(scaler) -> list[tuple]:
    """The stages and what was found; how often it was, a ShardedGradScaler adds up over ranks."""
    return [
        (
            state["stage"].name,
            {str(d): (bool(v), v.dtype, tuple(v.shape)) for d, v in found.items()},
        )
        for state in scaler._per_optimizer_states.values()
        for found in [state["found_inf_per_device"]]
    ]


def started(scaler: str):
    made = SCALERS[scaler]("cpu", init_scale=8.0, growth_interval=2)
    made.scale(torch.ones(()))
    return made


FUSED = pytest.mark.parametrize("name, fused", [("AdamW", True), ("AdamW", False), ("SGD", False)])


def torch_is_right(layout: str, scaler: str, fused: bool) -> bool:
    """Whether torch 2.13 does the same with one rank's overflow on all ranks, and raises nothing.

    On plain parameters its GradScaler knows of it on that rank alone; its ShardedGradScaler fails
    with fused optimizers, since what it records for them is not 0-dim.
    """
    return not fused if scaler == "ShardedGradScaler" else layout == "FSDP2"


@contextmanager
def torchs_warning():
    """ShardedGradScaler's unscale_ warns on DTensors of that same dim."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found a non-scalar tensor")
        yield


def torchs_clip_and_step(scaler, optimizer, model) -> None:
    with torchs_warning():
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)


def exact_step(oracle, exact, unscaled) -> None:
    total = exact_norm(unscaled)
    for one, grad in zip(exact, unscaled, strict=True):
        one.grad = grad * min(1.0, MAX_NORM / (total + 1e-6))
    oracle.step()


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("layout", ["FSDP2", "plain"])
@FUSED
@on_ranks(2)
def test_a_training_with_an_overflow_on_one_rank(name, fused, layout, scaler):
    """Against float64, and against torch's own calls where they are right."""
    compared = torch_is_right(layout, scaler, fused)
    models = [model_of(layout) for _ in range(1 + compared)]
    optimizers = [OPTIMIZERS[name](one.parameters(), fused=fused) for one in models]
    scalers = [started(scaler) for _ in models]
    exact = [nn.Parameter(one.double()) for one in values(models[0])]
    oracle = OPTIMIZERS[name](exact)
    scales = []
    for step, size in enumerate((3.0, 1e-3, 1.0, 1.0, 2.0)):
        for one, its in zip(models, scalers, strict=True):
            one.zero_grad()
            backward(one, its.get_scale(), size)
            if step == 2 and dist.get_rank() == 1:
                local_of(one[0].weight.grad).view(-1)[0] = math.inf
        grads = grads_of(models[0])
        raw = [local_of(grad).clone() for grad in grads]
        if step != 2:
            exact_step(
                oracle, exact, [full(grad).double() / scalers[0].get_scale() for grad in grads]
            )
        clip_and_step(scalers[0], optimizers[:1], models[0], into_step=True)
        if step == 2:
            assert all(torch.equal(was, local_of(now)) for was, now in zip(raw, grads, strict=True))
        assert same_everywhere(recorded(scalers[0]))
        if compared:
            torchs_clip_and_step(scalers[1], optimizers[1], models[1])
            assert recorded(scalers[0]) == recorded(scalers[1])
        for one in scalers:
            one.update()
        scales.append(scalers[0].get_scale())
        for one in models:
            for mine, other in zip(values(one), exact, strict=True):
                torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=5e-6)
        assert scalers[0].state_dict() == scalers[-1].state_dict()
    assert scales == [8.0, 16.0, 8.0, 8.0, 16.0]


@pytest.mark.parametrize("layout", ["FSDP2", "plain"])
@FUSED
@on_ranks(2)
def test_an_overflow_on_one_rank_stops_all_ranks(name, fused, layout):
    model = model_of(layout)
    optimizer = OPTIMIZERS[name](model.parameters(), fused=fused)
    scaler = started("GradScaler")
    backward(model, 8.0)
    if dist.get_rank() == 0:
        local_of(model[0].weight.grad).view(-1)[0] = -math.inf
    before = values(model)
    clip_and_step(scaler, [optimizer], model, into_step=True)
    (state,) = scaler._per_optimizer_states.values()
    assert [found.item() for found in state["found_inf_per_device"].values()] == [1.0]
    scaler.update()
    assert everywhere(scaler.get_scale()) == [4.0, 4.0]
    assert all(torch.equal(was, now) for was, now in zip(before, values(model), strict=True))


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("layout", ["FSDP2", "plain"])
@on_ranks(2)
def test_the_state_is_what_unscale_leaves(layout, scaler, bad):
    """Of two optimizers the second is left to the scaler itself, with what it communicates."""
    models = model_of(layout), model_of(layout)
    scalers = started(scaler), started(scaler)
    made = [[optim.SGD(part.parameters()) for part in (one[0], one[1:])] for one in models]
    for one in models:
        backward(one, 8.0)
        if bad:
            local_of(one[0].weight.grad).view(-1)[0] = math.inf
    with count_collectives() as calls:
        mark_unscaled(scalers[0], made[0][0], torch.tensor(bad))
    assert calls == []
    with torchs_warning():
        scalers[0].unscale_(made[0][1])
        for one in made[1]:
            scalers[1].unscale_(one)
    assert recorded(scalers[0]) == recorded(scalers[1])
    for one in scalers:
        one.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == (4.0 if bad else 8.0)


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_a_rank_without_gradients_goes_along(fused, scaler):
    """As a pipeline's stage that is frozen: its scale must not part from the others'."""
    model = mlp()
    optimizer = optim.AdamW(model.parameters(), fused=fused)
    made = started(scaler)
    backward(model, 8.0)
    model[0].weight.grad[0, 0] = math.inf
    if dist.get_rank() == 0:
        model.zero_grad()
    step_with_scaler(made, optimizer, torch.tensor(True))
    made.update()
    assert everywhere(made.get_scale()) == [4.0, 4.0]


@on_ranks(2)
def test_several_optimizers_on_meshes_and_plain_tensors():
    """A fused one on DTensors, a fused one on plain tensors, and one that is not fused."""
    model = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 5)])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=generator))
    start = values(model)
    fully_shard(model[0], mesh=mesh_of(2))
    grads = [torch.randn(one.shape, generator=generator) for one in model.parameters()]
    for one, grad in zip(model.parameters(), grads, strict=True):
        sharded = hasattr(one, "full_tensor")
        one.grad = (
            distribute_tensor(grad, one.device_mesh, one.placements) if sharded else grad.clone()
        )
        one.grad *= 8.0
    kinds = [
        lambda ps: optim.AdamW(ps, lr=0.1, fused=True),
        lambda ps: optim.SGD(ps, lr=0.1, fused=True),
        lambda ps: optim.Adam(ps, lr=0.1),
    ]
    made = [kind(part.parameters()) for kind, part in zip(kinds, model, strict=True)]
    ids = group_of(model)
    assert [factor_group(one, ids) for one in made] == [0, 0, None]
    scaler = started("GradScaler")
    clip_and_step(scaler, made, model, into_step=True)
    scaler.update()
    exact = [nn.Parameter(one.double()) for one in start]
    total = exact_norm(grads)
    assert total > MAX_NORM
    for one, grad in zip(exact, grads, strict=True):
        one.grad = grad.double() * MAX_NORM / (total + 1e-6)
    for kind, part in zip(kinds, (exact[:2], exact[2:4], exact[4:]), strict=True):
        kind(part).step()
    for mine, other in zip(values(model), exact, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-6)
