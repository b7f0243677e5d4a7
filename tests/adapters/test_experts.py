"""Expert parallelism: experts on their own mesh, with all-to-all dispatch, beside dense FSDP2."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardclip import ReplicaMismatchError
from tests.ranks import on_ranks, raised_everywhere
from tests.ranks.tensors import exact_norm, local_of, mesh_of
from tests.ranks.unsharded import CLIPS, assert_norm

BOTH = pytest.mark.parametrize("clip", CLIPS)
TOKENS, WIDTH, EXPERTS = 6, 8, 4


class Dense(nn.Module):
    """What every rank has: a projection, the router, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.after = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, moe, favoured: int | None) -> Tensor:
        hidden = self.before(x)
        share = self.router(hidden).softmax(-1)
        chosen = share.argmax(-1) if favoured is None else torch.full((len(x),), favoured)
        gain = share.gather(1, chosen[:, None])
        return self.after(gain * moe(hidden, chosen)).tanh()


class Expert(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(50 + number)
        self.inner = nn.Linear(WIDTH, 5)
        self.outer = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu())


def batch(rank: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))


def truth(ranks: int, favoured: int | None) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """float64 gradients of one process with all experts; experts without a token have zeros."""
    dense, experts = Dense().double(), [Expert(i).double() for i in range(EXPERTS)]

    def moe(hidden: Tensor, chosen: Tensor) -> Tensor:
        outs = torch.stack([expert(hidden) for expert in experts])
        return outs[chosen, torch.arange(len(hidden))]

    for rank in range(ranks):
        (dense(batch(rank).double(), moe, favoured).square().mean() / ranks).backward()
    return grads_of(dense), [grads_of(expert) for expert in experts]


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad for name, one in module.named_parameters()}


class Exchange(torch.autograd.Function):
    """all_to_all_single with uneven splits, both ways."""

    @staticmethod
    def forward(ctx, x, out, into, group):
        ctx.back = (into, out, group)
        received = x.new_empty(sum(out), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), out, into, group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.back), None, None, None


def dispatched(experts: dict[int, nn.Module], mesh):
    """Send each token to the rank that has its expert, and what comes out back."""
    group, size = mesh.get_group(), mesh.size()
    per_rank = EXPERTS // size

    def moe(hidden: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        into = torch.bincount(chosen // per_rank, minlength=size)
        out = torch.empty_like(into)
        dist.all_to_all_single(out, into, group=group)
        splits = out.tolist(), into.tolist(), group
        arrived = Exchange.apply(hidden[order], *splits)
        to = functional.wait_tensor(
            functional.all_to_all_single(chosen[order], splits[0], splits[1], group)
        )
        result = arrived * 0.0  # so that every rank's backward sends its tokens' gradients back
        for number, expert in experts.items():
            rows = (to == number).nonzero()[:, 0]
            if len(rows):
                result = result.index_add(0, rows, expert(arrived[rows]))
        returned = Exchange.apply(result, splits[1], splits[0], group)
        return returned[order.argsort()]

    return moe


def build(clip: str, favoured: int | None = None):
    """Dense layers under FSDP2 on all four ranks; two experts on each rank of an ep pair."""
    mesh = mesh_of(2, 2, names=("edp", "ep"))
    dense = fully_shard(Dense(), mesh=mesh_of(4, names=("dp",)))
    first = 2 * mesh.get_local_rank("ep")
    experts = {number: Expert(number) for number in (first, first + 1)}
    dense(
        batch(dist.get_rank()), dispatched(experts, mesh["ep"]), favoured
    ).square().mean().backward()
    for expert in experts.values():
        for one in expert.parameters():
            if one.grad is not None:  # of tokens of two ranks each; averaged over all four
                one.grad /= 4
    return mesh, dense, experts


def reduce_experts(mesh, experts) -> None:
    for number in experts:
        for one in experts[number].parameters():
            if favoured_somewhere(one, mesh):
                one.grad = torch.zeros_like(one) if one.grad is None else one.grad
                dist.all_reduce(one.grad, group=mesh.get_group("edp"))


def favoured_somewhere(parameter: nn.Parameter, mesh) -> bool:
    has = torch.tensor(float(parameter.grad is not None))
    dist.all_reduce(has, group=mesh.get_group("edp"))
    return has.item() > 0


def check(clip, dense, experts, favoured=None, **options) -> None:
    right, of_experts = truth(4, favoured)
    everything = [*right.values(), *(g for expert in of_experts for g in expert.values())]
    total = exact_norm([g for g in everything if g is not None])
    named = list(dense.named_parameters())
    for number, expert in experts.items():
        named += [(f"experts.{number}.{name}", one) for name, one in expert.named_parameters()]
    given = named if clip == "clipper" else [one for _, one in named]
    norm = CLIPS[clip](given, total / 4, 2.0, **options)
    assert_norm(norm, total, rtol=1e-5)
    for name, one in dense.named_parameters():
        torch.testing.assert_close(
            one.grad.full_tensor(), (right[name] / 4).float(), rtol=1e-4, atol=1e-6
        )
    for number, expert in experts.items():
        for name, one in expert.named_parameters():
            if one.grad is not None:
                torch.testing.assert_close(
                    local_of(one.grad), (of_experts[number][name] / 4).float(), rtol=1e-4, atol=1e-6
                )


def over_experts(mesh):
    """Plain experts: others on each ep rank, copies over edp."""
    placed = (mesh, (Replicate(), Shard(0)))
    return lambda parameter: None if isinstance(parameter, DTensor) else placed


@BOTH
@on_ranks(4)
def test_plain_experts_beside_dense_fsdp2(clip):
    """A clipper knows experts apart by their names; the function by a layout."""
    mesh, dense, experts = build(clip)
    reduce_experts(mesh, experts)
    options = {} if clip == "clipper" else {"layout": over_experts(mesh)}
    check(clip, dense, experts, **options)


@BOTH
@on_ranks(4)
def test_ranks_whose_experts_got_no_token(clip):
    """All tokens go to expert 3: ranks 0 and 2 have no expert gradient, 1 and 3 one expert's."""
    mesh, dense, experts = build(clip, favoured=3)
    reduce_experts(mesh, experts)
    here = [one.grad for expert in experts.values() for one in expert.parameters()]
    assert sum(grad is not None for grad in here) == (4 if mesh.get_local_rank("ep") else 0)
    options = {} if clip == "clipper" else {"layout": over_experts(mesh)}
    check(clip, dense, experts, favoured=3, **options)


@on_ranks(4)
def test_plain_experts_without_a_layout_are_found_to_be_no_copies():
    mesh, dense, experts = build("function")
    reduce_experts(mesh, experts)
    parameters = [p for module in (dense, *experts.values()) for p in module.parameters()]
    raised_everywhere(
        lambda: CLIPS["function"](parameters, 1e-3, 2.0), ReplicaMismatchError, "layout="
    )


@BOTH
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@on_ranks(4)
def test_stacked_experts_as_dtensors_need_no_layout(clip, norm_type):
    """As torchtitan has them: one tensor of all experts, cut over ep, and FSDP2 over edp."""
    mesh = mesh_of(2, 2, names=("edp", "ep"))
    torch.manual_seed(4)
    grads = torch.randn(EXPERTS, WIDTH, 5)
    stack = nn.Module()
    stack.weight = nn.Parameter(
        distribute_tensor(torch.zeros(EXPERTS, WIDTH, 5), mesh["ep"], [Shard(0)])
    )
    fully_shard(stack, mesh=mesh["edp"])
    assert stack.weight.device_mesh.ndim == 2
    own = grads.chunk(2)[mesh.get_local_rank("ep")].chunk(2)[mesh.get_local_rank("edp")]
    stack.weight.grad = DTensor.from_local(
        own.clone(), stack.weight.device_mesh, stack.weight.placements, run_check=False
    )
    router = nn.Parameter(distribute_tensor(torch.zeros(9), mesh_of(4, names=("dp",)), [Shard(0)]))
    dense = torch.randn(9, generator=torch.Generator().manual_seed(8))
    router.grad = distribute_tensor(dense, mesh_of(4, names=("dp",)), [Shard(0)])
    named = [("router", router), ("experts.weight", stack.weight)]
    total = exact_norm([grads, dense], norm_type)
    given = named if clip == "clipper" else [one for _, one in named]
    assert_norm(CLIPS[clip](given, total / 4, norm_type), total)
    torch.testing.assert_close(local_of(stack.weight.grad), own / 4, rtol=1e-5, atol=0)
    torch.testing.assert_close(router.grad.full_tensor(), dense / 4, rtol=1e-5, atol=0)
