"""`fully_shard` models: the norm and the clip of the unsharded twin."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from shardclip import GradClipper, ReplicaMismatchError
from tests.ranks import on_ranks, raised_everywhere
from tests.ranks.models import average_, loss_of, mlp, unsharded_gradients
from tests.ranks.tensors import exact_norm, local_of, mesh_of
from tests.ranks.unsharded import CLIPS, assert_norm
from tests.ranks.warned import recorded

BOTH = pytest.mark.parametrize("clip", CLIPS)
POWERS = pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, math.inf])


def fully_sharded(mesh, model: nn.Module | None = None, **options) -> nn.Module:
    model = mlp() if model is None else model
    fully_shard(model[1], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(one.grad) for name, one in model.named_parameters() if one.grad is not None}


def assert_clips_like_its_twin(model, expected, clip, norm_type=2.0, **options) -> None:
    """Norm: exact for the gathered gradients, and close to the unsharded twin's."""
    before = gathered(model)
    assert before.keys() == expected.keys()
    for name, grad in before.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-5)
    total = exact_norm(before.values(), norm_type)
    norm = CLIPS[clip](model, total / 4, norm_type, **options)
    assert_norm(norm, total)
    assert_norm(norm, exact_norm(expected.values(), norm_type), rtol=1e-4)
    for name, grad in gathered(model).items():
        torch.testing.assert_close(grad, before[name] / 4, rtol=1e-5, atol=0)


@POWERS
@BOTH
@on_ranks(4)
def test_one_axis(norm_type, clip):
    model = fully_sharded(mesh_of(4))
    loss_of(model, dist.get_rank()).backward()
    assert_clips_like_its_twin(model, unsharded_gradients(4), clip, norm_type)


@POWERS
@BOTH
@on_ranks(4)
def test_hsdp(norm_type, clip):
    model = fully_sharded(mesh_of(2, 2, names=("replicate", "shard")))
    loss_of(model, dist.get_rank()).backward()
    assert_clips_like_its_twin(model, unsharded_gradients(4), clip, norm_type)


@BOTH
@on_ranks(4)
def test_prescribed_gradients(clip):
    """The weight's gradient is [1, 1, 3, 5]: 6; clipped to 3: halves."""
    model = fully_shard(nn.Linear(1, 4, bias=False), mesh=mesh_of(4))
    (model(torch.ones(1, 1)) * torch.tensor([1.0, 1, 3, 5])).sum().backward()
    assert_norm(CLIPS[clip](model, 3.0, 2.0), 6.0)
    mine = (0.5, 0.5, 1.5, 2.5)[dist.get_rank()]
    assert local_of(model.weight.grad).item() == pytest.approx(mine)


class Block(nn.Module):
    """Embedding and norm outside or inside the plan, column and row parallel layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.out(hidden + self.down(self.up(self.norm(hidden)).relu())).tanh()


def block_loss(model: nn.Module, data_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(data_rank)
    return model(torch.randint(0, 11, (2, 6), generator=generator)).square().mean()


def block_gradients() -> dict[str, torch.Tensor]:
    twin = Block()
    for rank in range(2):
        (block_loss(twin, rank) / 2).backward()
    return {name: one.grad for name, one in twin.named_parameters()}


@POWERS
@BOTH
@on_ranks(4)
def test_tensor_parallel_with_parameters_outside_the_plan(norm_type, clip):
    """Embedding, norm and head are on mesh["dp"] alone: the same on both tp ranks."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model = Block()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    block_loss(model, mesh.get_local_rank("dp")).backward()
    assert isinstance(model.up.weight.grad.placements[0], _StridedShard)
    assert model.norm.weight.grad.device_mesh.ndim == 1
    assert_clips_like_its_twin(model, block_gradients(), clip, norm_type)


@BOTH
@on_ranks(4)
def test_sequence_parallel(clip):
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model = Block()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    block_loss(model, mesh.get_local_rank("dp")).backward()
    assert_clips_like_its_twin(model, block_gradients(), clip)


@BOTH
@pytest.mark.parametrize("interleaved", [False, True])
@on_ranks(4)
def test_pipeline_stages_on_the_dp_part_of_a_root_mesh(clip, interleaved):
    """Nothing in a gradient says pp; with interleaving a rank holds two stages."""
    mesh = mesh_of(2, 2, names=("pp", "dp"))
    rank, per_rank = mesh.get_local_rank("pp"), 2 if interleaved else 1
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2 * per_rank)]
    twin = nn.Sequential(*blocks)
    torch.manual_seed(6)
    inputs, targets = torch.randn(2, 2, 8, 8)
    for data_rank in range(2):
        ((twin(inputs[data_rank]) - targets[data_rank]).square().mean() / 2).backward()
    expected = {f"{name}": one.grad.clone() for name, one in twin.named_parameters()}
    twin.zero_grad()
    mine = {index: blocks[index] for index in range(rank, 2 * per_rank, 2)}
    run_schedule(mesh, mine, 2 * per_rank, inputs, targets)
    pairs = [(f"{i}.{name}", one) for i, m in mine.items() for name, one in m.named_parameters()]
    total = exact_norm(expected.values())
    norm = CLIPS[clip](pairs if clip == "clipper" else [one for _, one in pairs], total / 4, 2.0)
    assert_norm(norm, total, rtol=1e-5)
    for name, one in pairs:
        torch.testing.assert_close(full(one.grad), expected[name] / 4, rtol=1e-4, atol=1e-7)


def run_schedule(mesh, mine, count, inputs, targets) -> None:
    """Shard this rank's stages over dp and send this data rank's batch through the pipeline."""
    group = mesh.get_group("pp")
    stages = [
        PipelineStage(fully_shard(m, mesh=mesh["dp"]), i, count, torch.device("cpu"), group=group)
        for i, m in mine.items()
    ]

    def loss(output, target):
        return (output - target).square().mean()

    if len(stages) == 1:
        schedule = Schedule1F1B(stages[0], 4, loss_fn=loss)
    else:
        schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=loss)
    data_rank = mesh.get_local_rank("dp")
    first = (inputs[data_rank],) if 0 in mine else ()
    last = {"target": targets[data_rank]} if count - 1 in mine else {}
    schedule.step(*first, **last)


@BOTH
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
@on_ranks(4)
def test_mixed_precision(clip, reduce):
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce)
    model = fully_sharded(mesh_of(4), mp_policy=policy)
    loss_of(model, dist.get_rank()).backward()
    total = exact_norm(gathered(model).values())
    assert model[0].weight.grad.dtype == torch.float32
    assert_norm(CLIPS[clip](model, total / 4, 2.0), total)
    assert exact_norm(gathered(model).values()) == pytest.approx(total / 4, rel=1e-5)


@BOTH
@on_ranks(4)
def test_bfloat16_parameters(clip):
    model = fully_sharded(mesh_of(4), mlp().bfloat16())
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    total = exact_norm(gathered(model).values())
    norm = CLIPS[clip](model, total / 4, 2.0)
    assert norm.dtype == torch.float32
    assert_norm(norm, total)
    assert exact_norm(gathered(model).values()) == pytest.approx(total / 4, rel=4e-3)


@BOTH
@on_ranks(4)
def test_frozen_and_tied_parameters(clip):
    def tied():
        model = nn.ModuleDict({"embed": nn.Embedding(9, 6), "head": nn.Linear(6, 9, bias=False)})
        model["head"].weight = model["embed"].weight
        model["gain"] = nn.Linear(6, 6)
        model["gain"].weight.requires_grad_(False)
        return model

    def loss(model):
        return model["head"](model["gain"](model["embed"](torch.arange(9)))).square().mean()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.parts = tied()

        def forward(self):
            return loss(self.parts)

    twin, model = Whole(), fully_shard(Whole(), mesh=mesh_of(4))
    twin().backward()
    model().backward()
    expected = {name: one.grad for name, one in twin.named_parameters() if one.grad is not None}
    assert_clips_like_its_twin(model, expected, clip)


@on_ranks(4)
def test_accumulation_with_synchronisation_off():
    """Until the last micro-batch there are no gradients: 0, and a warning that says why."""
    model = fully_sharded(mesh_of(4))
    clipper = GradClipper(model, 1e9)
    model.set_requires_gradient_sync(False)
    loss_of(model, dist.get_rank()).backward()
    with recorded() as messages:
        assert_norm(clipper.clip_().total_norm, 0.0)
    assert all("gradient" in message for message in messages)
    model.set_requires_gradient_sync(True)
    loss_of(model, dist.get_rank()).backward()
    norm = clipper.clip_().total_norm
    assert_norm(norm, 2 * exact_norm(unsharded_gradients(4).values()), rtol=1e-4)


@pytest.mark.parametrize("how", ["ignored", "added after"])
@pytest.mark.parametrize("synchronised", [True, False])
@BOTH
@on_ranks(4)
def test_parameters_that_fully_shard_does_not_manage(how, synchronised, clip):
    """Ignored parameters and adapters added later stay plain, and nobody reduces them."""
    model = mlp()
    if how == "ignored":
        model = fully_sharded(mesh_of(4), model, ignored_params={model[3].weight})
        unmanaged = model[3].weight
    else:
        model = fully_sharded(mesh_of(4), model)
        model[3].adapter = unmanaged = nn.Parameter(torch.zeros(2, 7))
        model[3].register_forward_hook(lambda layer, args, out: out + args[0] @ layer.adapter.T)
    loss_of(model, dist.get_rank()).backward()
    assert type(unmanaged.grad) is torch.Tensor
    name = "weight" if how == "ignored" else "adapter"
    if not synchronised:
        raised_everywhere(
            lambda: CLIPS[clip](model, 1e-3, 2.0), ReplicaMismatchError, rf"3\.{name}", "all_reduce"
        )
        return
    average_(unmanaged.grad)
    total = exact_norm(gathered(model).values())
    assert_norm(CLIPS[clip](model, total / 4, 2.0), total)
    assert exact_norm(gathered(model).values()) == pytest.approx(total / 4, rel=1e-5)
