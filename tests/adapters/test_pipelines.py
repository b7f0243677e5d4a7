"""torch.distributed.pipelining: stages are parts of one model, whatever else shards them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardclip import ReplicaMismatchError
from tests.adapters.pipelines import batch, blocks, full, loss, run, truth
from tests.ranks import on_ranks, raised_everywhere
from tests.ranks.tensors import exact_norm, mesh_of
from tests.ranks.unsharded import CLIPS, assert_norm

BOTH = pytest.mark.parametrize("clip", CLIPS)


def assert_clips_like_its_twin(stages, expected, clip, **options) -> None:
    named = list(stages.named_parameters())
    total = exact_norm(expected.values())
    given = named if clip == "clipper" else [one for _, one in named]
    norm = CLIPS[clip](given, total / 4, 2.0, **options)
    assert_norm(norm, total, rtol=1e-5)
    for name, one in named:
        wanted = (expected[name] / 4).float()
        torch.testing.assert_close(full(one.grad), wanted, rtol=1e-4, atol=1e-6)


def layout_for(clip: str, mesh):
    """What the function has to be told of plain stages; names tell it to a clipper."""
    if clip == "clipper" or "dp" in mesh.mesh_dim_names:
        return {}
    over_tp = [Replicate()] * (mesh.ndim - 1)
    plain = (mesh, (Shard(0), *over_tp))
    return {"layout": lambda p: None if isinstance(p, DTensor) else plain}


def check(clip, schedule, stages_per_rank, names) -> None:
    mesh = mesh_of(*([2] * len(names) if len(names) > 1 else [dist.get_world_size()]), names=names)
    model = blocks(mesh["pp"].size() * stages_per_rank)
    expected = truth(model, mesh["dp"].size() if "dp" in names else 1)
    stages = run(mesh, model, schedule)
    assert_clips_like_its_twin(stages, expected, clip, **layout_for(clip, mesh))


@BOTH
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@on_ranks(2)
def test_two_plain_stages(clip, schedule):
    check(clip, schedule, 1, ("pp",))


@BOTH
@pytest.mark.parametrize(
    "schedule, per_rank", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero bubble", 2)]
)
@on_ranks(4)
def test_four_ranks_of_plain_stages(clip, schedule, per_rank):
    check(clip, schedule, per_rank, ("pp",))


@BOTH
@pytest.mark.parametrize(
    "schedule, per_rank", [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zero bubble", 2)]
)
@on_ranks(4)
def test_stages_under_fsdp2(clip, schedule, per_rank):
    check(clip, schedule, per_rank, ("pp", "dp"))


@BOTH
@on_ranks(4)
def test_stages_under_tp_alone(clip):
    """The blocks' norms are plain, copies on the tp ranks of one stage."""
    check(clip, "1f1b", 1, ("pp", "tp"))


@BOTH
@pytest.mark.parametrize("schedule, per_rank", [("1f1b", 1), ("interleaved", 2)])
@on_ranks(8)
def test_stages_under_fsdp2_and_tp(clip, schedule, per_rank):
    check(clip, schedule, per_rank, ("pp", "dp", "tp"))


@on_ranks(2)
def test_plain_stages_without_a_layout_are_found_to_be_no_copies():
    stages = run(mesh_of(2, names=("pp",)), blocks(2), "gpipe")
    parameters = list(stages.parameters())
    before = [one.grad.clone() for one in parameters]
    raised_everywhere(
        lambda: CLIPS["function"](parameters, 1e-3, 2.0), ReplicaMismatchError, "layout="
    )
    for one, old in zip(parameters, before, strict=True):
        assert torch.equal(one.grad, old)


class First(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(weight.clone(), freeze=False)
        self.body = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(tokens)).tanh()


class Last(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(8, len(weight), bias=False)
        self.head.weight = nn.Parameter(weight.clone())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


def tied_truth(first, last, data_ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the one embedding, and of the body's weight and bias."""
    shared = first.embed.weight.detach().double().requires_grad_()
    body = nn.Linear(8, 8).double()
    body.load_state_dict({k: v.double() for k, v in first.body.state_dict().items()})
    for rank in range(data_ranks):
        tokens, target = tied_batch(rank)
        output = body(shared[tokens]).tanh() @ shared.T
        (loss(output, target.double()) / data_ranks).backward()
    return shared.grad, body.weight.grad, body.bias.grad


def tied_batch(data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(8) + data_rank, batch(data_rank)[1].repeat(1, 2)[:, :11]


@BOTH
@pytest.mark.parametrize("fsdp", [False, True])
@on_ranks(4)
def test_a_tied_embedding_on_first_and_last_stage_counts_once(clip, fsdp):
    """Its gradients are added up over the two stages, as pipelines do; a layout says the rest."""
    names = ("pp", "dp") if fsdp else ("dp", "pp")
    mesh = mesh_of(2, 2, names=names)
    stage, data_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    torch.manual_seed(3)
    weight = torch.randn(11, 8)
    first, last = First(weight), Last(weight)
    embed, *body = tied_truth(first, last, 2)
    module = last if stage else first
    if fsdp:
        fully_shard(module, mesh=mesh["dp"])
    schedule = ScheduleGPipe(
        PipelineStage(module, stage, 2, torch.device("cpu"), group=mesh.get_group("pp")),
        2,
        loss_fn=loss,
    )
    tokens, target = tied_batch(data_rank)
    schedule.step(*(() if stage else (tokens,)), **({"target": target} if stage else {}))
    tied = module.head.weight if stage else module.embed.weight
    if not fsdp:
        for one in module.parameters():
            dist.all_reduce(one.grad, group=mesh.get_group("dp"))
            one.grad /= 2
    local = tied.grad.to_local() if fsdp else tied.grad
    dist.all_reduce(local, group=mesh.get_group("pp"))

    def layout(parameter):
        over_dp = Shard(0) if fsdp else Replicate()
        over_pp = Replicate() if parameter is tied else Shard(0)
        placed = {"dp": over_dp, "pp": over_pp}
        return mesh, tuple(placed[name] for name in names)

    expected = {"tied": embed, **({} if stage else {"weight": body[0], "bias": body[1]})}
    total = exact_norm([embed, *body])
    parameters = [("embed.weight", tied)]
    if not stage:
        parameters += [("body.weight", first.body.weight), ("body.bias", first.body.bias)]
    given = parameters if clip == "clipper" else [one for _, one in parameters]
    norm = CLIPS[clip](given, total / 4, 2.0, layout=layout)
    assert_norm(norm, total, rtol=1e-5)
    for (_, one), wanted in zip(parameters, expected.values(), strict=True):
        torch.testing.assert_close(full(one.grad), (wanted / 4).float(), rtol=1e-4, atol=1e-6)
