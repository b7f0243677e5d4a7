"""Lightning's Trainer and Fabric: their own lines, clipped by shardclip, on two ranks."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from tests.ranks import count_collectives, raised_everywhere
from tests.ranks.unsharded import assert_one_all_reduce
from tests.systems import loops
from tests.systems.loops import ACCUMULATE, LEARNING_RATE, MAX_NORM, STEPS, on_two_ranks

FSDP = FullyShardedDataParallel
PRECISION = {"ddp": 1e-9, "fsdp2": 1e-9, "fsdp1": 1e-6}
"""Lightning's FSDP strategy makes the model float32."""
pytestmark = pytest.mark.timeout(400)
importing = loops.imported_on_ranks("lightning.pytorch", "lightning.fabric")
KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])


def sharded(model: nn.Module, mesh) -> nn.Module:
    for block in (model[0], model[1][0]):
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def wrapped(model: nn.Module) -> FSDP:
    """Wrapped by hand, which Lightning leaves as it is: its own wrapping wants an accelerator."""
    return FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)


def lightning_module(kind: str, **methods):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = loops.model()
            self.micro = 0

        def configure_model(self):
            if kind == "fsdp2":
                sharded(self.model, self.device_mesh)
            elif kind == "fsdp1":
                self.model = wrapped(self.model)

        def training_step(self, batch, index):
            return loops.loss_of(self.model, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

        def on_train_end(self):
            self.after = parameters_of(self.trainer.model)

    for name, method in methods.items():
        setattr(Module, name, method)
    return Module()


def parameters_of(model):
    """Names without the LightningModule's prefix, and whole values."""
    from shardclip.layout.sources import clean

    if any(isinstance(module, FSDP) for module in model.modules()):
        with FSDP.summon_full_params(model):
            named = [(clean(n), p.detach().clone()) for n, p in model.named_parameters()]
    else:
        named = [(clean(n), loops.full(p).clone()) for n, p in model.named_parameters()]
    return [(name.removeprefix("model."), value) for name, value in named]


def strategy_of(kind: str):
    from lightning.pytorch import strategies

    if kind == "ddp":
        return strategies.DDPStrategy()
    if kind == "fsdp2":
        return strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)

    class OnCpu(strategies.FSDPStrategy):
        """The real one; Lightning refuses only this class itself on CPU."""

    return OnCpu()


@contextmanager
def trainer_of(kind: str, **options):
    import lightning.pytorch as pl

    settings = {"gradient_clip_val": MAX_NORM, "accumulate_grad_batches": ACCUMULATE}
    with loops.torchrun_environment():
        yield pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy_of(kind),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **{**settings, **options},
        )


def loader() -> DataLoader:
    rank, each = dist.get_rank(), [(s, m) for s in range(STEPS) for m in range(ACCUMULATE)]
    return DataLoader([loops.batch(rank, step, micro) for step, micro in each], batch_size=None)


def counted(trainer, callback):
    """What the precision plugin's clipping sends in each step, and the norm that came out."""
    plugin = trainer.precision_plugin
    original, clips, norms = plugin.clip_gradients, [], []

    def clip_gradients(*args, **kwargs):
        with count_collectives() as calls:
            original(*args, **kwargs)
        clips.append(calls)
        norms.append(callback.clipping.result.total_norm)

    plugin.clip_gradients = clip_gradients
    return clips, norms


@KINDS
@on_two_ranks
def test_the_trainer_trains_as_the_unsharded_model(kind):
    from shardclip.integrations.lightning import ShardclipCallback

    expected, after = loops.unsharded()
    callback = ShardclipCallback()
    with trainer_of(kind, callbacks=[callback]) as trainer:
        clips, norms = counted(trainer, callback)
        module = lightning_module(kind)
        trainer.fit(module, loader())
        assert len(clips) == STEPS
        for calls in clips:
            assert_one_all_reduce(calls)
        loops.assert_norms(norms, expected)
        loops.assert_trained(module.after, after, PRECISION[kind])
        assert callback.clipping.clipped_share() == 1.0
        assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)  # given back


@on_two_ranks
def test_lightning_alone_refuses_fsdp():
    """So the callback is what makes it work."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    with trainer_of("fsdp1") as trainer:
        module = lightning_module("fsdp1")
        raised_everywhere(
            lambda: trainer.fit(module, loader()), MisconfigurationException, "not supported"
        )


@on_two_ranks
def test_a_module_with_its_own_hook_is_heard():
    """What the hook asks for is what is clipped to; a step that it leaves alone is left alone."""
    from shardclip.integrations.lightning import ShardclipCallback

    def hook(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.trainer.global_step != 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.25, gradient_clip_algorithm="norm")
        self.left.append(loops.exact_norm([p.grad for p in self.parameters()], 2.0))

    callback = ShardclipCallback()
    with trainer_of("ddp", callbacks=[callback], gradient_clip_val=None) as trainer:
        module = lightning_module("ddp", configure_gradient_clipping=hook, left=[])
        trainer.fit(module, loader())
        assert [module.left[0], module.left[2]] == pytest.approx([0.25, 0.25], rel=1e-5)
        assert module.left[1] > MAX_NORM


@on_two_ranks
def test_two_optimizers_stepped_by_hand():
    """Each clip is of its optimizer's own parameters."""
    from shardclip.integrations.lightning import ShardclipCallback

    def configure_optimizers(self):
        halves = (self.model[0], self.model[1:])
        return [torch.optim.SGD(half.parameters(), lr=LEARNING_RATE) for half in halves]

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loops.loss_of(self.model, batch))
        for optimizer in self.optimizers():
            held = [p.grad for group in optimizer.param_groups for p in group["params"]]
            exact = loops.exact_norm(held, 2.0)
            with count_collectives() as calls:
                self.clip_gradients(optimizer, 0.125, "norm")
            assert_one_all_reduce(calls)
            assert float(callback.clipping.result.total_norm) == pytest.approx(exact, rel=1e-6)
            assert loops.exact_norm(held, 2.0) == pytest.approx(min(exact, 0.125), rel=1e-4)
            self.clips.append(exact)
            optimizer.step()

    callback = ShardclipCallback()
    options = {"gradient_clip_val": None, "accumulate_grad_batches": 1, "callbacks": [callback]}
    with trainer_of("ddp", **options) as trainer:
        module = lightning_module(
            "ddp", configure_optimizers=configure_optimizers, training_step=training_step, clips=[]
        )
        module.automatic_optimization = False
        trainer.fit(module, loader())
        assert len(module.clips) == 2 * STEPS * ACCUMULATE
        assert all(any(norm > 0.125 for norm in module.clips[half::2]) for half in (0, 1))


@on_two_ranks
def test_a_skipped_step_leaves_the_parameters_alone():
    from shardclip.integrations.lightning import ShardclipCallback

    def poison(self, optimizer):
        if self.trainer.global_rank == 1:
            next(self.parameters()).grad.view(-1)[0] = math.nan

    callback = ShardclipCallback(nonfinite="skip")
    with trainer_of("ddp", callbacks=[callback]) as trainer:
        module = lightning_module("ddp", on_before_optimizer_step=poison)
        trainer.fit(module, loader())
        assert callback.clipping.result.skipped
        loops.assert_trained(module.after, dict(loops.model().named_parameters()))


@on_two_ranks
def test_nothing_to_clip_to_is_an_error():
    from shardclip.integrations.lightning import ShardclipCallback

    with trainer_of("ddp", gradient_clip_val=None, callbacks=[ShardclipCallback()]) as trainer:
        module = lightning_module("ddp")
        raised_everywhere(
            lambda: trainer.fit(module, loader()), ValueError, r"Trainer\(gradient_clip_val"
        )


@contextmanager
def fabric_of(kind: str):
    from lightning.fabric import Fabric, strategies

    class OnCpu(strategies.FSDPStrategy):
        """The real one; Lightning refuses only this class itself on CPU."""

    chosen = {
        "ddp": strategies.DDPStrategy,
        "fsdp1": OnCpu,
        "fsdp2": lambda: strategies.ModelParallelStrategy(
            sharded, data_parallel_size=2, tensor_parallel_size=1
        ),
    }[kind]()
    with loops.torchrun_environment():
        fabric = Fabric(accelerator="cpu", devices=2, strategy=chosen)
        fabric.launch()
        yield fabric


def bare_of(kind: str) -> nn.Module:
    return wrapped(loops.model()) if kind == "fsdp1" else loops.model()


@KINDS
@on_two_ranks
def test_fabric_trains_as_the_unsharded_model(kind):
    from shardclip.integrations.lightning import attach

    expected, after = loops.unsharded()
    with fabric_of(kind) as fabric:
        model = fabric.setup_module(bare_of(kind))
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        optimizer = fabric.setup_optimizers(optimizer)
        clipping = attach(fabric, model)
        norms = []
        for step in range(STEPS):
            for micro in range(ACCUMULATE):
                accumulating = micro < ACCUMULATE - 1
                with fabric.no_backward_sync(model, enabled=accumulating and kind != "fsdp1"):
                    loss = loops.loss_of(model, loops.batch(dist.get_rank(), step, micro))
                    fabric.backward(loss / ACCUMULATE)
            with count_collectives() as calls:
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM))
            assert_one_all_reduce(calls)
            optimizer.step()
            optimizer.zero_grad()
        loops.assert_norms(norms, expected)
        loops.assert_trained(parameters_of(model._forward_module), after, PRECISION[kind])
        assert clipping.clipped_share() == 1.0


@KINDS
@on_two_ranks
def test_fabric_raises_where_the_norm_is_not_finite(kind):
    """As Fabric's own does unless it is told not to."""
    from shardclip import NonFiniteGradientError
    from shardclip.integrations.lightning import attach

    with fabric_of(kind) as fabric:
        model = fabric.setup_module(bare_of(kind))
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        optimizer = fabric.setup_optimizers(optimizer)
        attach(fabric, model)
        loss = loops.loss_of(model, loops.batch(dist.get_rank(), 0, 0))
        fabric.backward(loss * (math.nan if dist.get_rank() else 1.0))
        raised_everywhere(
            lambda: fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM),
            NonFiniteGradientError,
        )
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        assert math.isnan(float(norm))
