"""The Hugging Face Trainer, on a tiny random Llama, offline: max_grad_norm by shardclip."""

import math
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import SequentialSampler

from tests.ranks import count_collectives, raised_everywhere
from tests.ranks.unsharded import assert_one_all_reduce
from tests.systems import loops
from tests.systems.loops import ACCUMULATE, LEARNING_RATE, RANKS, STEPS, on_two_ranks

BATCH, MAX_NORM = 2, 0.1
pytestmark = pytest.mark.timeout(400)
importing = loops.imported_on_ranks("transformers.trainer", "transformers.models.llama")
KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
FSDP = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
SETTINGS = {
    "ddp": {},
    "fsdp2": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2, **FSDP}},
    "fsdp1": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": 1,
            "use_orig_params": True,
            "sync_module_states": False,
            "cpu_ram_efficient_loading": False,
            **FSDP,
        },
    },
}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
SETTINGS |= {
    f"zero{stage}": {"deepspeed": {**DEEPSPEED, "zero_optimization": {"stage": stage}}}
    for stage in (0, 1, 2, 3)
}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def dataset() -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 61, (RANKS * ACCUMULATE * BATCH * STEPS, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def unsharded(max_norm: float):
    """Each step's exact norm and factor, and the parameters after; all data in order."""
    twin, norms = llama(), []
    rows = torch.stack([row["input_ids"] for row in dataset()]).view(STEPS, -1, 8)
    for step in range(STEPS):
        twin.zero_grad()
        twin(input_ids=rows[step], labels=rows[step]).loss.backward()
        norms.append(loops.clipped_descent(twin, max_norm))
    return norms, {name: p.detach() for name, p in twin.named_parameters()}


@contextmanager
def fsdp_on_cpu():
    """Make Accelerate choose FSDP, which it does not on CPU."""
    from accelerate import DistributedType, state

    original = state.AcceleratorState.__init__

    def patched(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            for kept in (state.PartialState, state.AcceleratorState):
                kept._shared_state["distributed_type"] = DistributedType.FSDP
                kept._shared_state["device"] = torch.device("cpu")
            state.AcceleratorState._shared_state["fsdp_plugin"] = fsdp_plugin

    state.AcceleratorState.__init__ = patched
    try:
        yield
    finally:
        state.AcceleratorState.__init__ = original


@contextmanager
def deepspeed_on_cpu():
    """Tell Accelerate the backend, without which it takes each rank for a world of its own."""
    from accelerate import state

    original = state.PartialState.__init__

    def patched(self, *args, **kwargs):
        original(self, *args, **{"backend": "gloo", **kwargs})

    state.PartialState.__init__ = patched
    try:
        yield
    finally:
        state.PartialState.__init__ = original


@contextmanager
def trainer_of(kind: str, max_norm: float, **options):
    """A Trainer that counts what its clipping sends, and keeps the training logs."""
    from accelerate import state
    from transformers import Trainer, TrainingArguments

    from shardclip.integrations.transformers import ShardclipMixin

    class Counting(ShardclipMixin, Trainer):
        clip_options = options

        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

        def _clip_grad_norm(self, model):
            with count_collectives() as calls:
                norm = super()._clip_grad_norm(model)
            self.clips.append(calls)
            return norm

        def _get_grad_norm(self, model, grad_norm=None):
            with count_collectives() as calls:
                norm = super()._get_grad_norm(model, grad_norm=grad_norm)
            self.reads.append(calls)
            return norm

    with loops.torchrun_environment():
        arguments = TrainingArguments(
            "never-written",
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATE,
            max_steps=STEPS,
            max_grad_norm=max_norm,
            optim="sgd",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            use_cpu="deepspeed" not in SETTINGS[kind],
            ddp_backend="gloo",
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **SETTINGS[kind],
        )
        trainer = Counting(llama(), arguments, train_dataset=dataset())
        trainer.clips, trainer.reads = [], []
        try:
            yield trainer
        finally:
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


def training_logs(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@KINDS
@on_two_ranks
def test_trains_as_the_unsharded_model(kind):
    expected, after = unsharded(MAX_NORM)
    assert all(norm > MAX_NORM for norm in expected)
    with fsdp_on_cpu(), trainer_of(kind, MAX_NORM) as trainer:
        trainer.train()
        wanted = {"ddp": "MULTI_CPU", "fsdp1": "FSDP", "fsdp2": "FSDP"}[kind]
        assert trainer.accelerator.distributed_type == wanted
        assert len(trainer.clips) == STEPS
        for calls in trainer.clips:
            assert_one_all_reduce(calls)
        assert trainer.reads == [[]] * STEPS
        for entry, norm in zip(training_logs(trainer), expected, strict=True):
            assert entry["grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert entry["clipped_grad_norm"] == pytest.approx(MAX_NORM, rel=1e-4)
            assert entry["clip_coef"] == pytest.approx(MAX_NORM / (norm + 1e-6), rel=1e-5)
            assert entry["clipped_share"] == 1.0
        loops.assert_trained(parameters_of(trainer.model_wrapped), after, rtol=1e-5)


def parameters_of(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    from shardclip.layout.sources import clean

    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [(clean(n), p.detach().clone()) for n, p in model.named_parameters()]
    return [(clean(name), p) for name, p in model.named_parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_two_ranks
def test_deepspeed_is_clipped_inside_its_step(stage):
    import deepspeed

    expected, after = unsharded(MAX_NORM)
    with deepspeed_on_cpu(), trainer_of(f"zero{stage}", MAX_NORM) as trainer:
        with loops.every_clip_counted() as clips:
            trainer.train()
        assert trainer.accelerator.distributed_type == "DEEPSPEED"
        assert trainer.accelerator.num_processes == RANKS
        loops.assert_one_all_reduce_each(clips)
        for entry, norm in zip(training_logs(trainer), expected, strict=True):
            assert entry["grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert entry["clipped_grad_norm"] == pytest.approx(MAX_NORM, rel=1e-4)
            assert entry["clipped_share"] == 1.0
        held = list(trainer.model_wrapped.module.named_parameters())
        with deepspeed.zero.GatheredParameters([p for _, p in held], enabled=stage == 3):
            loops.assert_trained(held, after, rtol=1e-5)


@on_two_ranks
def test_the_share_of_clipped_steps_since_the_last_log():
    norms, _ = unsharded(math.inf)
    between = sorted(norms)[1] + 1e-4  # so that one step of three is clipped
    with trainer_of("ddp", between) as trainer:
        trainer.args.logging_steps = trainer.state.logging_steps = STEPS
        trainer.train()
        (entry,) = training_logs(trainer)
        assert entry["clipped_share"] == pytest.approx(1 / STEPS)


@on_two_ranks
def test_a_max_grad_norm_of_zero_measures_only():
    expected, after = unsharded(math.inf)
    with trainer_of("ddp", 0.0) as trainer:
        trainer.train()
        assert trainer.clips == []
        for calls in trainer.reads:
            assert_one_all_reduce(calls)
        for entry, norm in zip(training_logs(trainer), expected, strict=True):
            assert entry["grad_norm"] == pytest.approx(entry["clipped_grad_norm"], rel=1e-6)
            assert entry["grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert (entry["clip_coef"], entry["clipped_share"]) == (1.0, 0.0)
        loops.assert_trained(parameters_of(trainer.model_wrapped), after, rtol=1e-5)


@on_two_ranks
def test_ddp_where_fsdp_was_asked_for_is_an_error():
    with trainer_of("fsdp2", MAX_NORM) as trainer:
        raised_everywhere(trainer.train, RuntimeError, "asked for FSDP, but runs MULTI_CPU")


@on_two_ranks
def test_gradients_on_several_meshes():
    """The Trainer's own way around Accelerate ends in the one all-reduce, too."""
    with trainer_of("ddp", MAX_NORM) as trainer:
        trainer._mixed_mesh_grads = True
        trainer.train()
        for calls in trainer.clips:
            assert_one_all_reduce(calls)
        assert len(training_logs(trainer)) == STEPS
