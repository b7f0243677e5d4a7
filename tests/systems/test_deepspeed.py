"""DeepSpeed's engine, ZeRO stages 0 to 3: the true norm, and clipping inside engine.step()."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardclip import GradClipper, NonFiniteGradientError
from tests.ranks import count_collectives, raised_everywhere
from tests.ranks.tensors import coefficient, exact_norm
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce
from tests.systems.deepspeed_moe import MoENet, Twin
from tests.systems.frameworks import on_ranks

MICRO_BATCHES = 2
MODES = {
    "0": {},
    "0 bf16": {"bf16": True},
    "1": {},
    "1 offload": {"offload": True},
    "1 bf16": {"bf16": True},
    "1 bf16_optimizer": {"bf16": True, "accumulate": "fp32"},
    "2": {},
    "2 offload": {"offload": True},
    "2 bf16": {"bf16": True},
    "2 bf16 fp32": {"bf16": True, "accumulate": "fp32"},
    "2 bf16 unchecked": {"bf16": True, "checks": False},
    "2 without its norm": {"norm": False},
    "3": {},
    "3 offload": {"offload": True},
    "3 bf16": {"bf16": True},
    "2 bf16 offload": {"bf16": True, "offload": True},
    "3 bf16 offload": {"bf16": True, "offload": True},
}


def model() -> nn.Sequential:
    """Sizes that neither two nor four ranks divide, and a frozen parameter."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(13, 17), nn.ReLU(), nn.Linear(17, 5), nn.LayerNorm(5))
    made[3].bias.requires_grad_(False)
    return made


def batch(rank: int, micro: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * micro + rank)
    return torch.randn(4, 13, generator=generator).to(dtype)


def engine_of(mode: str, net: nn.Module, optimizer=torch.optim.SGD, split=list, **config):
    """An engine of this mode; SGD with a learning rate of 1 shows the gradients in the step."""
    import deepspeed

    stage, told = int(mode[0]), MODES[mode]
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"name": "matrices", "params": [p for p in trained if p.ndim > 1]},
        {"name": "vectors", "params": [p for p in trained if p.ndim == 1]},
    ]
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        **config,
    }
    if told.get("bf16"):
        settings["bf16"] = {"enabled": True, "check_grad_overflow": told.get("checks", True)}
    if "norm" in told:  # then DeepSpeed sums no norm of its own, nor looks at one
        settings["zero_optimization"]["compute_grad_norm"] = told["norm"]
        settings["gradient_clipping"] = 0.0
    if "accumulate" in told:
        settings["data_types"] = {"grad_accum_dtype": told["accumulate"]}
    if told.get("offload"):
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer(split(groups), lr=1.0), config=settings
    )
    return engine


def backward(engine, scale: float = 1.0) -> None:
    """All micro-batches' backward passes; the last one's step is left to the test."""
    dtype = next(p for p in engine.module.parameters() if p.requires_grad).dtype
    for micro in range(MICRO_BATCHES):
        loss = engine(batch(dist.get_rank(), micro, dtype)).float().square().mean() * scale
        engine.backward(loss)
        if micro < MICRO_BATCHES - 1:
            engine.step()


def truth(net: nn.Module) -> dict[str, torch.Tensor]:
    """Unsharded float64 gradients of all ranks' micro-batches."""
    net = copy.deepcopy(net).double()
    ranks = dist.get_world_size()
    for rank in range(ranks):
        for micro in range(MICRO_BATCHES):
            loss = net(batch(rank, micro).double()).square().mean()
            (loss / ranks / MICRO_BATCHES).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.requires_grad}


def weights(engine) -> dict[str, torch.Tensor]:
    """The full weights, at the precision that the optimizer steps in."""
    from deepspeed.utils import safe_get_full_fp32_param

    def full(p):
        plain = engine.zero_optimization_stage() < 3 and p.dtype == torch.float32
        found = None if plain else safe_get_full_fp32_param(p)
        return p.detach() if found is None else found

    named = engine.module.named_parameters()
    return {name: full(p).double().clone() for name, p in named if p.requires_grad}


def gradients(engine) -> dict[str, torch.Tensor]:
    """The full gradients as DeepSpeed itself puts them together."""
    from deepspeed.utils import safe_get_full_grad
    from deepspeed.utils.tensor_fragment import get_full_hp_grad

    def full(parameter):
        if engine.zero_optimization_stage() == 3:
            return safe_get_full_grad(parameter)
        return get_full_hp_grad(parameter) if hasattr(parameter, "_hp_mapping") else parameter.grad

    return {n: full(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad}


def check(mode: str, by_hand: bool) -> None:
    net = model()
    expected = truth(net)
    engine = engine_of(mode, net)
    rough = 3e-2 if MODES[mode].get("bf16") else 1e-5
    total = exact_norm(expected.values())
    clipper = GradClipper.from_deepspeed(engine, max_norm=total / 4, norms="parameter")
    backward(engine)
    held = gradients(engine)
    before = weights(engine)
    if by_hand:
        with count_collectives() as calls:
            clipper.clip_()
        assert_one_all_reduce(calls)
    engine.step()
    assert clipper.steps == 1  # once, at the boundary
    result = clipper.result
    norm = exact_norm(held.values())
    assert_norm(result.total_norm, norm)
    assert abs(norm - total) < rough * total
    assert float(engine.get_global_grad_norm()) == result.total_norm.item()
    assert result.clipped
    assert set(result.norms) == set(expected)
    for name, found in result.norms.items():
        assert found == pytest.approx(exact_norm([held[name]]), rel=1e-6)
    factor = coefficient(norm, total / 4)
    after = weights(engine)
    for name, grad in expected.items():
        loose = {"rtol": rough, "atol": rough * total / 10}
        if mode == "0 bf16":  # the weights themselves are rounded to bf16
            loose["atol"] = 1e-2
        torch.testing.assert_close(before[name] - after[name], grad * factor, **loose)


@pytest.mark.parametrize("by_hand", [True, False], ids=["clip_", "step"])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_clips_like_the_unsharded_model(mode, by_hand):
    check(mode, by_hand)


@pytest.mark.parametrize("mode", ["1", "2", "3", "3 offload", "1 bf16_optimizer"])
@on_ranks(4)
def test_ranks_that_hold_none_of_a_group(mode):
    check(mode, by_hand=True)


@pytest.mark.parametrize("mode", ["0", "1", "2", "3", "2 offload"])
@on_ranks(2)
def test_takes_over_from_deepspeeds_own_clipping(mode):
    net = model()
    expected = truth(net)
    total = exact_norm(expected.values())
    engine = engine_of(mode, net, gradient_clipping=total / 100)
    GradClipper.from_deepspeed(engine, max_norm=total / 4)
    backward(engine)
    before = weights(engine)
    engine.step()
    moved = [before[name] - now for name, now in weights(engine).items()]
    assert exact_norm(moved) == pytest.approx(total / 4, rel=1e-4)


@pytest.mark.parametrize("mode", ["1", "2", "3", "1 bf16_optimizer", "3 bf16", "2 offload"])
@on_ranks(2)
def test_agrees_with_deepspeeds_norm_where_that_is_right(mode):
    norms = []
    for clips in (False, True):
        engine = engine_of(mode, model())
        if clips:
            GradClipper.from_deepspeed(engine, max_norm=1e9)
        backward(engine)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def seen_by_the_optimizer(engine) -> list[torch.Tensor]:
    """Every gradient that the optimizer under DeepSpeed's is given from now on."""
    given = []

    def keep(optimizer, *_):
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        assert all(grad is None or grad.dtype == torch.float32 for grad in held)
        given.extend(grad.clone() for grad in held if grad is not None)

    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    inner.register_step_pre_hook(keep)
    return given


@pytest.mark.parametrize("by_hand", [True, False], ids=["clip_", "step"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if "without" not in mode])
@on_ranks(2)
def test_the_optimizer_is_given_what_deepspeeds_own_clipping_gives_it(mode, by_hand):
    """To the rounding of a float32; in bf16, whose weights take none of it up, for eight steps."""
    max_norm, given, norms, ends = 0.05, [], [], []
    steps = 8 if MODES[mode].get("bf16") else 1
    for ours in (False, True):
        own = {} if ours else {"gradient_clipping": max_norm}
        if mode == "2 bf16 unchecked":
            own["bf16"] = {"enabled": True, "check_grad_overflow": False}
        engine = engine_of(mode, model(), torch.optim.Adam, **own)
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2
        clipper = GradClipper.from_deepspeed(engine, max_norm) if ours else None
        given.append(seen_by_the_optimizer(engine))
        norms.append([])
        for _ in range(steps):
            backward(engine)
            if ours and by_hand:
                clipper.clip_()
            engine.step()
            norms[-1].append(float(engine.get_global_grad_norm() or math.nan))
        ends.append(weights(engine))
    assert len(given[0]) == len(given[1]) >= steps
    for theirs, own in zip(*given, strict=True):
        torch.testing.assert_close(own, theirs, rtol=4e-7, atol=1e-8 * max_norm)
    if mode != "0":  # where the engine clips by torch's function, and keeps no norm
        assert norms[1] == pytest.approx(norms[0], rel=1e-6)
        assert min(norms[0]) > 2 * max_norm
    for name, theirs in ends[0].items():
        torch.testing.assert_close(ends[1][name], theirs, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_a_step_that_does_not_come_to_its_clipping_raises():
    engine = engine_of("3 bf16", model())
    engine.optimizer.step = lambda *_, **__: None  # as of another version, without that stage
    GradClipper.from_deepspeed(engine, max_norm=0.1)
    backward(engine)
    raised_everywhere(engine.step, RuntimeError, "stepped without its stage for clipping")


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_skipped_step_changes_nothing_and_the_next_one_is_right(mode):
    twins = []
    for fault in (False, True):
        engine = engine_of(mode, model(), torch.optim.Adam)
        clipper = GradClipper.from_deepspeed(engine, max_norm=0.1, nonfinite="skip")
        for step in range(3):
            before = weights(engine)
            if fault and step == 1:
                backward(engine, torch.inf if dist.get_rank() == 1 else 1.0)
                engine.step()
                assert clipper.result.skipped
                assert not engine.was_step_applied()
                for name, now in weights(engine).items():
                    assert torch.equal(now, before[name])
            backward(engine)
            engine.step()
            assert engine.was_step_applied()
            assert torch.isfinite(clipper.result.total_norm)
        assert engine.skipped_steps == clipper.skipped == fault
        twins.append(weights(engine))
    for name, right in twins[0].items():
        assert torch.equal(right, twins[1][name])


@pytest.mark.parametrize("policy", ["raise", "propagate"])
@pytest.mark.parametrize("mode", ["2 bf16 unchecked", "3"])
@on_ranks(2)
def test_a_norm_that_is_not_finite_is_never_minus_one(mode, policy):
    """DeepSpeed reports -1 or inf, and in bf16 takes the step unclipped."""
    engine = engine_of(mode, model())
    clipper = GradClipper.from_deepspeed(engine, max_norm=0.1, nonfinite=policy)
    backward(engine, torch.nan if dist.get_rank() == 1 else 1.0)
    if policy == "raise":
        before = gradients(engine)
        raised_everywhere(engine.step, NonFiniteGradientError, r"2\.weight")
        for name, now in gradients(engine).items():
            assert torch.equal(now.isnan(), before[name].isnan())
        return
    engine.step()
    assert math.isnan(float(engine.get_global_grad_norm()))
    assert math.isnan(clipper.result.total_norm)


@pytest.mark.parametrize("mode", ["0", "1", "2", "1 bf16_optimizer"])
@on_ranks(4)
def test_experts_count_over_their_own_ranks(mode):
    """Two experts on two ranks each; DeepSpeed averages the experts' norms instead."""
    check_experts(mode)


def check_experts(mode: str) -> None:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    net = MoENet()
    expected = truth(Twin())
    total = exact_norm(expected.values())
    engine = engine_of(mode, net, split=split)
    clipper = GradClipper.from_deepspeed(engine, max_norm=total / 4)
    backward(engine)
    before = weights(engine)
    with count_collectives() as calls:
        clipper.clip_()
    assert_one_all_reduce(calls)
    engine.step()
    rough = 3e-2 if MODES[mode].get("bf16") else 1e-5
    assert_norm(clipper.result.total_norm, total, rtol=rough)
    factor = coefficient(total, total / 4)
    for name, now in weights(engine).items():
        loose = {"rtol": rough, "atol": rough * total / 10}
        grad = expected[net.twins_name(name)]
        torch.testing.assert_close(before[name] - now, grad * factor, **loose)


@pytest.mark.parametrize("norm_type", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("mode", ["2", "3"])
@on_ranks(4)
def test_other_norms(mode, norm_type):
    engine = engine_of(mode, model())
    clipper = GradClipper.from_deepspeed(engine, 1e9, norm_type)
    backward(engine)
    expected = exact_norm(gradients(engine).values(), norm_type)
    assert_norm(clipper.clip_().total_norm, expected)


LAYOUTS = {
    "sub-groups": {"stage": 3, "sub_group_size": 100},
    "sub-groups offload": {
        "stage": 3,
        "sub_group_size": 100,
        "offload_optimizer": {"device": "cpu"},
    },
    "round robin": {"stage": 2, "round_robin_gradients": True},
    "aligned": {"stage": 2, "parameter_alignment": True},
    "scattered": {"stage": 1, "contiguous_gradients": False},
    "small buckets": {"stage": 2, "reduce_bucket_size": 50, "overlap_comm": True},
    "hpZ": {"stage": 3, "zero_hpz_partition_size": 2},
    "parameters offload": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_other_layouts_of_the_partitions(layout):
    net = model()
    expected = truth(net)
    total = exact_norm(expected.values())
    zero = LAYOUTS[layout]
    engine = engine_of(str(zero["stage"]), net, zero_optimization=zero)
    clipper = GradClipper.from_deepspeed(engine, max_norm=total / 4, norms="parameter")
    backward(engine)
    before = weights(engine)
    engine.step()
    assert_norm(clipper.result.total_norm, total, rtol=1e-5)
    for name, norm in clipper.result.norms.items():
        assert norm == pytest.approx(exact_norm([expected[name]]), rel=1e-4)
    for name, now in weights(engine).items():
        moved = expected[name] * coefficient(total, total / 4)
        torch.testing.assert_close(before[name] - now, moved, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_a_second_clipper_replaces_the_first():
    engine = engine_of("2", model())
    first = GradClipper.from_deepspeed(engine, max_norm=1e-3)
    second = GradClipper.from_deepspeed(engine, max_norm=1e-2)
    backward(engine)
    before = weights(engine)
    engine.step()
    assert (first.steps, second.steps) == (0, 1)
    moved = [before[name] - now for name, now in weights(engine).items()]
    assert exact_norm(moved) == pytest.approx(1e-2, rel=1e-3)
    raised_everywhere(first.clip_, RuntimeError, "another GradClipper clips this engine")


@on_ranks(2)
def test_what_is_no_engine_is_rejected():
    with pytest.raises(TypeError, match=r"deepspeed\.initialize returns, got Sequential"):
        GradClipper.from_deepspeed(model(), max_norm=1.0)


@on_ranks(2)
def test_loss_scaling_is_rejected():
    """DeepSpeed has no fp16 on CPU, so the engine only says that it has."""
    engine = engine_of("2", model())
    engine.fp16_enabled = lambda: True
    with pytest.raises(ValueError, match="fp16's loss scaling"):
        GradClipper.from_deepspeed(engine, max_norm=1.0)


@on_ranks(2)
def test_an_optimizer_that_steps_during_the_backward_is_rejected():
    """SuperOffload does, unless it clips itself; it wants a GPU, so only its name is here."""
    engine = engine_of("3 offload", model())
    held = type(engine.optimizer)
    engine.optimizer.__class__ = type("SuperOffloadOptimizer_Stage3", (held,), {})
    with pytest.raises(ValueError, match="the engine uses SuperOffload"):
        GradClipper.from_deepspeed(engine, max_norm=1.0)
