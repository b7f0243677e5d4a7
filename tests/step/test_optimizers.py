"""The factor inside a fused optimizer's step: what it may go into, and what comes out."""

import math

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardclip.step.optimizers import factor_group, factor_groups, step_plain, step_scaled, unfused
from shardclip.step.scale import scale_
from tests.kernels.accelerator import accelerator, no_host_sync

F = torch.tensor


OPTIMIZERS = {
    "Adam": lambda ps, **k: optim.Adam(ps, lr=0.1, weight_decay=0.01, amsgrad=True, **k),
    "AdamW": lambda ps, **k: optim.AdamW(ps, lr=0.1, **k),
    "SGD": lambda ps, **k: optim.SGD(ps, lr=0.1, **k),
    "SGD momentum": lambda ps, **k: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, **k),
    "SGD maximize": lambda ps, **k: optim.SGD(ps, lr=0.1, maximize=True, **k),
    "Adagrad": lambda ps, **k: optim.Adagrad(ps, lr=0.1, **k),
}
EACH = pytest.mark.parametrize("name", OPTIMIZERS)

# Not SGD with 16-bit parameters: torch 2.13's fused kernel leaves most of them out on CPU
# (github.com/pytorch/pytorch/issues/191763).
EACH_DTYPE = pytest.mark.parametrize(
    "name, dtype",
    [(name, torch.float32) for name in OPTIMIZERS]
    + [(n, d) for n in ("Adam", "AdamW", "Adagrad") for d in (torch.bfloat16, torch.float16)],
)
SIZES = (1, 37, 1000)  # a kernel's vectors and its tail


def coef64(value: float) -> torch.Tensor:
    return F(value, dtype=torch.float64)


def parameters(dtype=torch.float32, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in SIZES]


def gradients(seed: int, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return [(torch.randn(n, generator=generator) * 3).to(dtype) for n in SIZES]


def give(params, grads) -> None:
    for one, grad in zip(params, grads, strict=True):
        one.grad = grad.clone()


def groups_of(params, group=0) -> dict[int, int]:
    return {id(one): group for one in params}


def states(optimizer) -> list[torch.Tensor]:
    return [
        value
        for params in optimizer.param_groups
        for one in params["params"]
        for value in optimizer.state[one].values()
        if isinstance(value, torch.Tensor)
    ]


# What comes out


@EACH_DTYPE
def test_a_gradient_is_within_two_roundings_of_the_exact_product(name, dtype):
    """And in its own dtype it is rounded once more."""
    params, coef = parameters(dtype), 0.3141592653589793
    optimizer = OPTIMIZERS[name](params, fused=True)
    give(params, gradients(0, dtype))
    step_scaled(optimizer, coef64(coef))
    own = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for one, grad in zip(params, gradients(0, dtype), strict=True):
        exact = grad.double() * coef
        assert not torch.equal(one.grad, grad)
        bound = (2.0**-23 + own) * 1.00001
        torch.testing.assert_close(one.grad.double(), exact, rtol=bound, atol=0)


def test_sgd_is_within_four_roundings_of_scaling_first():
    """Where the step is linear, the whole bound is known; and the two are not the same bits."""
    ours, theirs = parameters(), parameters()
    apart = 0
    for seed, coef in enumerate((1 / 3, 0.7, 1e-3)):
        give(ours, gradients(seed)), give(theirs, gradients(seed))
        before = [one.detach().clone() for one in ours]
        with torch.no_grad():
            for one, start in zip(theirs, before, strict=True):
                one.copy_(start)
        step_scaled(optim.SGD(ours, lr=0.1, fused=True), coef64(coef))
        scale_([one.grad for one in theirs], coef)
        optim.SGD(theirs, lr=0.1, fused=True).step()
        for mine, other in zip(ours, theirs, strict=True):
            moved = 0.1 * other.grad.abs() * (2.0**-22 + 2 * 2.0**-24)
            assert ((mine.grad - other.grad).abs() <= other.grad.abs() * 2.0**-22).all()
            assert ((mine - other).abs() <= moved + 2 * 2.0**-24 * other.abs()).all()
            apart += (mine.grad != other.grad).sum().item()
    assert apart > 0


@EACH
def test_steps_like_scaling_first(name):
    """Over several steps, clipped and not, of which one has a gradient less."""
    ours, theirs = parameters(), parameters()
    mine, other = OPTIMIZERS[name](ours, fused=True), OPTIMIZERS[name](theirs, fused=True)
    start = [one.detach().clone() for one in ours]
    for seed, coef in enumerate((0.5, 0.01, 1.0, 0.3)):
        give(ours, gradients(seed)), give(theirs, gradients(seed))
        if seed == 3:
            ours[0].grad = theirs[0].grad = None
        step_scaled(mine, coef64(coef))
        scale_([one.grad for one in theirs if one.grad is not None], coef)
        other.step()
    for mine_, other_, before in zip(ours, theirs, start, strict=True):
        torch.testing.assert_close(mine_, other_, rtol=1e-6, atol=4 * 0.1 * 2.0**-20)
        assert (mine_ - before).abs().max() > 1e-3
    for mine_, other_ in zip(states(mine), states(other), strict=True):
        bound = 4 * 2.0**-22 * other_.abs().max().item()
        torch.testing.assert_close(mine_, other_, rtol=1e-6, atol=bound)


def test_a_16_bit_gradient_is_rounded_once():
    """The step works with the product as it is before it is rounded to the gradient's dtype."""
    one = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    (grad,) = gradients(0, torch.bfloat16)[2:]
    one.grad = grad.clone()
    optimizer = optim.Adam([one], betas=(0.5, 0.5), fused=True)
    step_scaled(optimizer, coef64(1 / 3))
    once, twice = grad.double() / 3, (grad.double() / 3).bfloat16().double()
    assert torch.equal(one.grad, once.bfloat16())
    assert torch.equal(optimizer.state[one]["exp_avg_sq"], (once.square() / 2).bfloat16())
    assert not torch.equal((once.square() / 2).bfloat16(), (twice.square() / 2).bfloat16())


@EACH_DTYPE
@pytest.mark.parametrize("found_inf", [None, 0.0])
def test_a_coefficient_of_one_changes_no_bit(name, dtype, found_inf):
    ours, theirs = parameters(dtype), parameters(dtype)
    mine, other = OPTIMIZERS[name](ours, fused=True), OPTIMIZERS[name](theirs, fused=True)
    for seed in range(3):
        give(ours, gradients(seed, dtype)), give(theirs, gradients(seed, dtype))
        step_scaled(mine, coef64(1.0), None if found_inf is None else F(found_inf))
        other.step()
    for mine_, other_ in zip(ours, theirs, strict=True):
        assert torch.equal(mine_, other_)
        assert torch.equal(mine_.grad, other_.grad)
    for mine_, other_ in zip(states(mine), states(other), strict=True):
        assert torch.equal(mine_, other_)


@pytest.mark.parametrize(
    "coef, expected",
    [
        (0.0, [0.0, 0.0, math.nan]),
        (math.nan, [math.nan] * 3),
        (1e-30, [1e-30, 1e8, math.inf]),
        (2.0**-126, [2.0**-126, 1e38 * 2.0**-126, math.inf]),
        (1e-40, [1e-40, 1e-2, math.inf]),
        (1e-44, [1e-44, 1e-6, math.inf]),
    ],
)
def test_extreme_coefficients_are_those_of_a_multiplication(coef, expected):
    one = nn.Parameter(torch.zeros(3))
    one.grad = F([1.0, 1e38, math.inf])
    step_scaled(optim.SGD([one], lr=1.0, fused=True), coef64(coef))
    torch.testing.assert_close(
        one.grad.double(), F(expected).double(), rtol=1e-6, atol=2.0**-149, equal_nan=True
    )
    torch.testing.assert_close(-one.detach(), one.grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("coef", [0.5, 1.0, 0.0, 1e-40, math.nan])
@EACH
def test_found_inf_leaves_everything_as_it_was(name, coef):
    params = parameters()
    optimizer = OPTIMIZERS[name](params, fused=True)
    give(params, gradients(0))
    step_scaled(optimizer, coef64(0.5))
    bad = gradients(1)
    bad[1][5] = math.inf
    give(params, bad)
    before = [one.detach().clone() for one in params], [one.clone() for one in states(optimizer)]
    step_scaled(optimizer, coef64(coef), F(True))
    after = [one.detach() for one in params], states(optimizer)
    for was, now in zip(before[0] + before[1], after[0] + after[1], strict=True):
        assert torch.equal(was, now)
    for one, grad in zip(params, bad, strict=True):
        assert torch.equal(one.grad, grad)


@pytest.mark.parametrize("found_inf", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])  # the others' kernels are not known there
def test_on_an_accelerator_nothing_is_read(name, found_inf):
    with accelerator() as device:
        one = nn.Parameter(torch.ones(3, device=device))
        one.grad = torch.ones(3, device=device)
        optimizer = OPTIMIZERS[name]([one], fused=True)
        coef = torch.full((), 0.5, dtype=torch.float64, device=device)
        found = torch.zeros((), dtype=torch.bool, device=device) if found_inf else None
        with no_host_sync():
            step_scaled(optimizer, coef, found)
        with pytest.raises(RuntimeError):
            float(coef)  # it would have raised
        with pytest.raises(AssertionError), no_host_sync():
            coef.cpu()


# The attributes


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("before", ["absent", None, 4.0])
def test_attributes_are_put_back(before, fails):
    (one,) = parameters()[1:2]
    (one.grad,) = gradients(0)[1:2]
    optimizer = optim.AdamW([one], fused=True)
    held = {}
    if before != "absent":
        held = {
            "grad_scale": None if before is None else F(before),
            "found_inf": None if before is None else F(0.0),
        }
        vars(optimizer).update(held)
    if fails:
        one.grad = one.grad.to_sparse()
        with pytest.raises(RuntimeError):
            step_scaled(optimizer, coef64(0.5), F(False))
    else:
        step_scaled(optimizer, coef64(0.5), F(False))
    now = {
        name: vars(optimizer)[name]
        for name in ("grad_scale", "found_inf")
        if name in vars(optimizer)
    }
    assert now.keys() == held.keys()
    assert all(now[name] is value for name, value in held.items())


@pytest.mark.parametrize("coef", [1.0, 0.25])
def test_a_factor_the_optimizer_had_before_still_counts(coef):
    one = nn.Parameter(torch.zeros(2))
    one.grad = F([8.0, 16.0])
    optimizer = optim.SGD([one], lr=1.0, fused=True)
    optimizer.grad_scale = F(4.0)
    step_scaled(optimizer, coef64(coef))
    assert one.grad.tolist() == [2.0 * coef, 4.0 * coef]
    optimizer.found_inf = F(1.0)
    for found_inf in (None, F(0.0)):
        step_scaled(optimizer, coef64(coef), found_inf)
        assert one.grad.tolist() == [2.0 * coef, 4.0 * coef]


def test_on_cpu_the_kernel_writes_no_gradients_for_a_coefficient_of_one():
    optimizer, _ = ready(OPTIMIZERS["AdamW"], fused=True)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.grad_scale))
    step_scaled(optimizer, coef64(1.0))
    step_scaled(optimizer, coef64(0.5))
    assert seen == [None, 2.0]


# What it may go into


def ready(make, **options):
    """An optimizer that has stepped once, its parameters with gradients."""
    params = parameters()
    optimizer = make(params, **options)
    give(params, gradients(0))
    optimizer.step()
    give(params, gradients(1))
    return optimizer, params


@EACH
def test_fused_optimizers_take_the_factor(name):
    optimizer, params = ready(OPTIMIZERS[name], fused=True)
    assert factor_group(optimizer, groups_of(params, 3)) == 3
    params[0].grad = None
    assert factor_group(optimizer, groups_of(params[1:], 3)) == 3  # without one, no coefficient


@EACH
@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {}])
def test_others_do_not(name, how):
    optimizer, params = ready(OPTIMIZERS[name], **how)
    assert factor_group(optimizer, groups_of(params)) is None


def test_optimizers_that_only_exist_unfused():
    optimizer, params = ready(optim.RAdam)
    assert factor_group(optimizer, groups_of(params)) is None


def test_all_gradients_must_be_of_one_group_of_the_clippers():
    optimizer, params = ready(OPTIMIZERS["AdamW"], fused=True)
    mixed = {**groups_of(params[:1], 0), **groups_of(params[1:], 1)}
    assert factor_group(optimizer, mixed) is None
    assert factor_group(optimizer, groups_of(params[1:])) is None  # one that is not the clipper's
    params[0].grad = None
    assert factor_group(optimizer, mixed) == 1
    for one in params:
        one.grad = None
    assert factor_group(optimizer, mixed) is None


def test_an_unfused_group_without_gradients_is_enough_for_torch_to_refuse():
    used, unused = parameters()[:2]
    used.grad = torch.ones(1)
    groups = [{"params": [used], "fused": True}, {"params": [unused], "fused": False}]
    optimizer = optim.AdamW(groups)
    assert factor_group(optimizer, groups_of([used, unused])) is None
    with pytest.raises(AssertionError) as refused:
        step_scaled(optimizer, coef64(0.5))
    assert "grad_scale" in str(refused.traceback[-1].statement)  # torch 2.8 gives no message


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_what_a_float32_factor_is_too_coarse_for(dtype):
    one = nn.Parameter(torch.ones(3, dtype=dtype))
    one.grad = torch.ones(3, dtype=dtype)
    assert factor_group(optim.AdamW([one], fused=True), groups_of([one])) is None


def test_a_sparse_gradient():
    one = nn.Parameter(torch.ones(3))
    one.grad = F([0.0, 1.0, 0.0]).to_sparse()
    assert factor_group(optim.AdamW([one], fused=True), groups_of([one])) is None


def test_a_subclass_may_look_at_the_gradients():
    class Mine(optim.AdamW):
        pass

    optimizer, params = ready(Mine, fused=True)
    assert factor_group(optimizer, groups_of(params)) is None


def test_a_hook_before_the_step_sees_the_gradients_and_one_after_it_the_scaled_ones():
    optimizer, params = ready(OPTIMIZERS["AdamW"], fused=True)
    seen = []
    after = optimizer.register_step_post_hook(lambda *_: seen.append(params[0].grad.item()))
    assert factor_group(optimizer, groups_of(params)) == 0
    expected = params[0].grad.item() * 0.5
    step_scaled(optimizer, coef64(0.5))
    assert seen == [expected]
    after.remove()
    before = optimizer.register_step_pre_hook(lambda *_: None)
    assert factor_group(optimizer, groups_of(params)) is None
    before.remove()
    everywhere = register_optimizer_step_pre_hook(lambda *_: None)
    assert factor_group(optimizer, groups_of(params)) is None
    everywhere.remove()
    assert factor_group(optimizer, groups_of(params)) == 0


def test_a_step_that_someone_has_wrapped():
    import functools

    optimizer, params = ready(OPTIMIZERS["AdamW"], fused=True)
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer)  # torch's schedulers count the calls
    assert factor_group(optimizer, groups_of(params)) == 0
    inner = optimizer.step

    @functools.wraps(inner)
    def logged(*args, **kwargs):
        return inner(*args, **kwargs)

    optimizer.step = logged
    assert factor_group(optimizer, groups_of(params)) is None
    optimizer.step = functools.partial(inner)
    assert factor_group(optimizer, groups_of(params)) is None


def test_optimizers_that_step_one_after_the_other():
    first, params = ready(OPTIMIZERS["AdamW"], fused=True)
    second, others = ready(OPTIMIZERS["SGD"], fused=True)
    third, unfused_ones = ready(OPTIMIZERS["SGD"])
    ids = {**groups_of(params, 1), **groups_of(others, 2), **groups_of(unfused_ones, 2)}
    found = factor_groups([first, second, third], ids)
    assert found == {id(first): 1, id(second): 2, id(third): None}
    shared = OPTIMIZERS["SGD"]([params[0]], fused=True)  # both would scale this one
    found = factor_groups([first, shared], ids)
    assert found == {id(first): None, id(shared): None}


def test_momentum_before_the_first_step():
    """torch's kernel would leave the buffer uninitialised where found_inf stops it."""
    params = parameters()
    give(params, gradients(0))
    optimizer = OPTIMIZERS["SGD momentum"](params, fused=True)
    assert factor_group(optimizer, groups_of(params)) is None
    optimizer.step()
    assert factor_group(optimizer, groups_of(params)) == 0


# Stepping without the fused kernel


def test_unfused_is_the_optimizer_without_its_fused_kernel():
    ours, theirs = parameters(), parameters()
    mine, other = optim.AdamW(ours, fused=True), optim.AdamW(theirs, fused=False)
    give(ours, gradients(0)), give(theirs, gradients(0))
    with unfused(mine):
        assert not mine._step_supports_amp_scaling
        mine.step()
    other.step()
    assert mine._step_supports_amp_scaling
    assert mine.param_groups[0]["fused"] is True
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_plain_step_is_the_optimizers_own():
    ours, theirs = parameters(), parameters()
    give(ours, gradients(0)), give(theirs, gradients(0))
    step_plain(OPTIMIZERS["SGD momentum"](ours, fused=True))
    OPTIMIZERS["SGD momentum"](theirs, fused=True).step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
