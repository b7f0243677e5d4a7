"""Accelerate: its own lines, clipped by shardclip, train as the unsharded model would."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from shardclip.layout.sources import clean
from tests.ranks import count_collectives, everywhere, raised_everywhere
from tests.systems import loops
from tests.systems.loops import (
    ACCUMULATE,
    LEARNING_RATE,
    MAX_NORM,
    STEPS,
    assert_one_all_reduce,
    on_two_ranks,
)

pytestmark = pytest.mark.timeout(400)
importing = loops.imported_on_ranks("accelerate")
KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])


@contextmanager
def accelerator_of(kind: str, shim: bool = True, **options):
    """An Accelerator of this kind on CPU, where it picks FSDP only with the shim below."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, state

    with loops.torchrun_environment():
        plugin = None
        if kind.startswith("fsdp"):
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=int(kind[-1]),
                auto_wrap_policy="size_based_wrap",
                min_num_params=40,
                cpu_ram_efficient_loading=False,
                **({"use_orig_params": True} if kind == "fsdp1" else {}),
            )
            plugin.sync_module_states = False
        options = {"cpu": True, "fsdp_plugin": plugin, **options}
        made = Accelerator(gradient_accumulation_steps=ACCUMULATE, **options)
        if plugin is not None and shim:
            for kept in (state.PartialState, state.AcceleratorState):
                kept._shared_state["distributed_type"] = DistributedType.FSDP
                kept._shared_state["device"] = torch.device("cpu")  # FSDP1 rejects "cpu:0"
            state.AcceleratorState._shared_state["fsdp_plugin"] = plugin
        try:
            yield made
        finally:
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


def prepared(accelerator):
    model = loops.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return accelerator.prepare(model, optimizer)


def train(accelerator, model, optimizer, clip, steps=STEPS) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        for micro in range(ACCUMULATE):
            with accelerator.accumulate(model):
                inputs = loops.batch(dist.get_rank(), step, micro).to(dtype)
                accelerator.backward(loops.loss_of(model, inputs))
                clip()
                optimizer.step()
                optimizer.zero_grad()


def parameters_of(accelerator, model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [(clean(n), p.detach().clone()) for n, p in model.named_parameters()]
    return [(clean(name), p) for name, p in model.named_parameters()]


@KINDS
@on_two_ranks
def test_trains_as_the_unsharded_model(kind):
    from shardclip.integrations.accelerate import attach

    expected, after = loops.unsharded()
    with accelerator_of(kind) as accelerator:
        wanted = {"ddp": "MULTI_CPU", "fsdp1": "FSDP", "fsdp2": "FSDP"}[kind]
        assert accelerator.distributed_type == wanted
        model, optimizer = prepared(accelerator)
        clipping = attach(accelerator, model)
        norms = []

        def clip():
            with count_collectives() as calls:
                norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            if accelerator.sync_gradients:
                assert_one_all_reduce(calls)
                norms.append(norm)
            else:
                assert (norm, calls) == (None, [])

        train(accelerator, model, optimizer, clip)
        loops.assert_norms(norms, expected)
        loops.assert_trained(parameters_of(accelerator, model), after)
        assert float(clipping.result.clip_coef) == pytest.approx(MAX_NORM / expected[-1], rel=1e-4)
        assert clipping.clipped_share() == 1.0
        assert clipping.clipped_share() == 0.0  # of the steps since


@KINDS
@on_two_ranks
def test_other_norms_and_a_part_of_the_parameters(kind):
    from shardclip.integrations.accelerate import attach

    twin = loops.model()
    for rank in range(2):
        (loops.loss_of(twin, loops.batch(rank, 0, 0)) / (2 * ACCUMULATE)).backward()
    grads = [p.grad for p in twin.parameters()]
    with accelerator_of(kind) as accelerator:
        model, _ = prepared(accelerator)
        attach(accelerator, model)
        accelerator.backward(loops.loss_of(model, loops.batch(dist.get_rank(), 0, 0)))
        for p in (1.0, math.inf):
            norm = accelerator.clip_grad_norm_(model.parameters(), math.inf, norm_type=p)
            assert float(norm) == pytest.approx(loops.exact_norm(grads, p), rel=1e-6)
        part = list(model.parameters())[:2]
        if kind == "fsdp1":  # a flat parameter alone does not tell what this rank holds of it
            raised_everywhere(
                lambda: accelerator.clip_grad_norm_(part, 1.0), ValueError, "pass the module"
            )
        else:
            norm = accelerator.clip_grad_norm_(part, math.inf)
            assert float(norm) == pytest.approx(loops.exact_norm(grads[:2], 2.0), rel=1e-6)
            norm = accelerator.clip_grad_norm_(part[0], math.inf)  # one tensor, as torch takes it
            assert float(norm) == pytest.approx(loops.exact_norm(grads[:1], 2.0), rel=1e-6)


@KINDS
@on_two_ranks
def test_a_skipped_step_leaves_the_parameters_alone(kind):
    from shardclip.integrations.accelerate import attach

    with accelerator_of(kind) as accelerator:
        model, optimizer = prepared(accelerator)
        clipping = attach(accelerator, model, nonfinite="skip")
        before = [p.detach().clone() for p in model.parameters()]

        def clip():
            if accelerator.sync_gradients and dist.get_rank() == 1:
                held = [p.grad for p in model.parameters() if p.grad is not None]
                local = [g.to_local() if hasattr(g, "to_local") else g for g in held]
                next(grad for grad in local if grad.numel()).view(-1)[0] = math.nan
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)

        train(accelerator, model, optimizer, clip, steps=1)
        assert clipping.result.skipped
        for was, parameter in zip(before, model.parameters(), strict=True):
            torch.testing.assert_close(loops.full(parameter), loops.full(was), rtol=0, atol=0)
        train(accelerator, model, optimizer, lambda: None, steps=1)
        moved = [
            not torch.equal(loops.full(was), loops.full(parameter))
            for was, parameter in zip(before, model.parameters(), strict=True)
        ]
        assert any(everywhere(any(moved)))


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
@on_two_ranks
def test_ddp_where_fsdp_was_asked_for_is_an_error(kind):
    from shardclip.integrations.accelerate import attach

    with accelerator_of(kind, shim=False) as accelerator:
        model, _ = prepared(accelerator)
        raised_everywhere(
            lambda: attach(accelerator, model),
            RuntimeError,
            "asked for FSDP, but runs MULTI_CPU",
            "cpu=True",
        )


@on_two_ranks
def test_without_a_model_it_is_an_error():
    from shardclip.integrations.accelerate import attach

    with accelerator_of("ddp") as accelerator:
        prepared(accelerator)
        raised_everywhere(lambda: attach(accelerator), ValueError, "prepare returned")


def deepspeed_options(stage: int, cpu: bool = False) -> dict:
    from accelerate import DeepSpeedPlugin, InitProcessGroupKwargs

    plugin = DeepSpeedPlugin(
        zero_stage=stage, gradient_accumulation_steps=ACCUMULATE, gradient_clipping=MAX_NORM
    )
    plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": 4,
        "zero_force_ds_cpu_optimizer": False,
    }
    handlers = [InitProcessGroupKwargs(backend="gloo")]
    return {"cpu": cpu, "deepspeed_plugin": plugin, "kwargs_handlers": handlers}


def whole(engine, stage: int) -> list:
    """The engine's float32 parameters."""
    import deepspeed

    held = list(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters([p for _, p in held], enabled=stage == 3):
        return [(name, p.detach().clone()) for name, p in held]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_two_ranks
def test_deepspeed_is_clipped_inside_its_step(stage):
    from shardclip.integrations.accelerate import attach

    expected, after = loops.unsharded()
    with loops.torchrun_environment(), accelerator_of("zero", **deepspeed_options(stage)) as made:
        assert made.distributed_type == "DEEPSPEED"
        model = loops.model().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        model, optimizer = made.prepare(model, optimizer)
        norms = []

        def clip():
            norm = made.clip_grad_norm_(model.parameters(), MAX_NORM)
            if made.sync_gradients:
                norms.append(norm)

        with loops.every_clip_counted() as clips:
            clipping = attach(made, model)  # max_norm is the plugin's
            train(made, model, optimizer, clip)
        loops.assert_one_all_reduce_each(clips)
        loops.assert_norms(norms, expected, rtol=1e-5)
        loops.assert_trained(whole(model, stage), after, rtol=1e-5)
        assert clipping.clipped_share() == 1.0
        raised_everywhere(
            lambda: made.clip_grad_norm_(model.parameters(), 2.0),
            ValueError,
            "stepped already, with 0.5",
        )


@on_two_ranks
def test_ddp_where_deepspeed_was_asked_for_is_an_error():
    from shardclip.integrations.accelerate import attach

    options = deepspeed_options(2, cpu=True)
    with loops.torchrun_environment(), accelerator_of("zero", **options) as accelerator:
        model, _ = prepared(accelerator)
        raised_everywhere(
            lambda: attach(accelerator, model), RuntimeError, "asked for DEEPSPEED, but runs MULTI"
        )
