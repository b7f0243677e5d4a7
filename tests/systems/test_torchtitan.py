"""torchtitan's Llama: its own clip_grad_norm_ beside shardclip's, on the same gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardclip import GradClipper, clip_grad_norm_
from shardclip.layout.adapters import torchtitan as adapter
from tests.ranks import Collective, count_collectives, everywhere
from tests.ranks.tensors import exact_norm, local_of, sharded
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce
from tests.systems.frameworks import on_ranks
from tests.systems.torchtitan_on_cpu import Model, torchtitan

DEGREES = {
    "fsdp": {"dp_shard": 4},
    "fsdp tp": {"dp_shard": 2, "tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "pp fsdp": {"pp": 2, "dp_shard": 2},
    "pp tp": {"pp": 2, "tp": 2},
}


def full_gradients(model: Model) -> dict[str, torch.Tensor]:
    """The gradients of all stages, put together."""
    mine = {name: one.grad.full_tensor() for name, one in model.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for told in everywhere(mine):
        found.update(told)
    return found


def clipped(named, total: float, dims, clipper: bool) -> list[Collective]:
    """Clip to a quarter of the norm, and check norm and gradients; what was communicated."""
    parameters = [one for _, one in named]
    old = [local_of(one.grad).clone() for one in parameters]
    made = GradClipper(named, total / 4) if clipper else None
    layout = adapter.layout(dims)
    with count_collectives() as calls:
        if made is not None:
            norm = made.clip_().total_norm
        else:
            norm = clip_grad_norm_(parameters, total / 4, layout=layout)
    assert_one_all_reduce(calls)
    assert_norm(norm, total)
    for one, was in zip(parameters, old, strict=True):
        torch.testing.assert_close(local_of(one.grad), was / 4, rtol=1e-5, atol=1e-12)
    return calls


def check(degrees, clipper: bool) -> None:
    torchtitan()
    from torchtitan.distributed.utils import clip_grad_norm_ as theirs

    model = Model(dist.get_world_size(), **degrees)
    model.backward()
    named = model.named_parameters()
    parameters = [one for _, one in named]
    total = exact_norm(full_gradients(model).values())
    with count_collectives() as before:
        pp_mesh = model.dims.get_optional_mesh("pp")
        norm = theirs(parameters, 1e9, foreach=True, pp_mesh=pp_mesh, ep_enabled=False)
    assert norm.item() == pytest.approx(total, rel=1e-4)
    calls = clipped(named, total, model.dims, clipper)
    assert len(before) >= len(calls)
    if sum(degree > 1 for degree in degrees.values()) > 1 and "dp_replicate" not in degrees:
        assert len(before) > len(calls)


@pytest.mark.parametrize("clipper", [False, True], ids=["function", "clipper"])
@pytest.mark.parametrize("degrees", DEGREES)
@on_ranks(4)
def test_the_same_norm_with_fewer_collectives(degrees, clipper):
    check(DEGREES[degrees], clipper)


@pytest.mark.parametrize("clipper", [False, True], ids=["function", "clipper"])
@on_ranks(8)
def test_fsdp_tp_and_pp_together(clipper):
    check({"pp": 2, "dp_shard": 2, "tp": 2}, clipper)


EXPERT_DEGREES = {
    "ep": {"dp_shard": 4, "ep": 4},
    "efsdp ep": {"dp_shard": 4, "ep": 2},
    "hsdp ep": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "tp ep": {"dp_shard": 2, "tp": 2, "ep": 4},
    "pp ep": {"pp": 2, "dp_shard": 2, "ep": 2},
}


def by_column(parameter: nn.Parameter) -> Shard:
    """Cut experts as torchtitan does where they are few."""
    return Shard(1)


class Block(nn.Module):
    """A dense layer, cut over tp, a norm, and experts; all on torchtitan's meshes for them."""

    def __init__(self, dims) -> None:
        super().__init__()
        copies = ["dp_replicate"] if dims.dp_replicate_enabled else []
        self.norm, self.dense = nn.LayerNorm(6), nn.Linear(6, 10)
        self.experts = nn.Linear(6, 8, bias=False)  # its rows are the experts
        on_ep = distribute_tensor(self.experts.weight.detach(), dims.get_mesh("ep"), [Shard(0)])
        self.experts.weight = nn.Parameter(on_ep)
        if dims.tp_enabled:
            tp = dims.get_mesh("tp")
            parallelize_module(self.dense, tp, ColwiseParallel())
            distribute_module(self.norm, tp)
        sparse = dims.get_mesh([*copies, "efsdp"])
        fully_shard(self.experts, mesh=sparse, shard_placement_fn=by_column)
        fully_shard(self, mesh=dims.get_mesh([*copies, "fsdp"]))


def gradients_of(stage: int) -> dict[str, torch.Tensor]:
    shapes = {"norm.weight": (6,), "norm.bias": (6,), "dense.weight": (10, 6), "dense.bias": (10,)}
    shapes["experts.weight"] = (8, 6)
    generator = torch.Generator().manual_seed(stage)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("clipper", [False, True], ids=["function", "clipper"])
@pytest.mark.parametrize("degrees", EXPERT_DEGREES)
@on_ranks(4)
def test_experts_on_its_sparse_mesh(degrees, clipper):
    torchtitan()
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import clip_grad_norm_ as theirs

    axes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1}
    told = {**axes, **EXPERT_DEGREES[degrees], "spmd_backend": "partial_dtensor"}
    dims = ParallelDims(**told, world_size=dist.get_world_size())
    dims.build_mesh()
    pp = dims.get_optional_mesh("pp")
    stage = pp.get_local_rank() if pp else 0
    total = exact_norm([one for s in range(dims.pp) for one in gradients_of(s).values()])
    full = gradients_of(stage)
    named = [(f"{stage}.{name}", one) for name, one in Block(dims).named_parameters()]
    parameters = [one for _, one in named]
    for name, one in named:
        one.grad = sharded(full[name.partition(".")[2]], one.device_mesh, one.placements)
    norm = theirs(parameters, 1e9, foreach=True, pp_mesh=pp, ep_enabled=True)
    assert norm.item() == pytest.approx(total, rel=1e-5)
    clipped(named, total, dims, clipper)


def test_what_is_no_parallel_dims_is_rejected():
    with pytest.raises(TypeError, match="ParallelDims, got int"):
        adapter.layout(4)
