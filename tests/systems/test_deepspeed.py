"""DeepSpeed's engine, ZeRO stages 0 to 3: the true norm, and clipping inside engine.step()."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardclip import GradClipper
from tests.ranks import count_collectives
from tests.ranks.tensors import coefficient, exact_norm
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce
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
    "3": {},
    "3 offload": {"offload": True},
    "3 bf16": {"bf16": True},
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


def engine_of(mode: str, net: nn.Module, optimizer=torch.optim.SGD, **config):
    """An engine of this mode; SGD with a learning rate of 1 shows the gradients in the step."""
    import deepspeed

    stage, told = int(mode[0]), MODES[mode]
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim == 1]},
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
        settings["bf16"] = {"enabled": True}
    if "accumulate" in told:
        settings["data_types"] = {"grad_accum_dtype": told["accumulate"]}
    if told.get("offload"):
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer(groups, lr=1.0), config=settings
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

    found = {}
    for name, p in engine.module.named_parameters():
        if p.requires_grad:
            full = safe_get_full_fp32_param(p)
            found[name] = (p.detach() if full is None else full).double().clone()
    return found


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
