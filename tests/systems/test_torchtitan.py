"""torchtitan's Llama: its own clip_grad_norm_ beside shardclip's, on the same gradients."""

import pytest
import torch
import torch.distributed as dist

from shardclip import GradClipper, clip_grad_norm_
from shardclip.adapters import torchtitan as adapter
from tests.ranks import count_collectives, everywhere
from tests.ranks.tensors import exact_norm, local_of
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
    old = [local_of(one.grad).clone() for one in parameters]
    made = GradClipper(named, total / 4) if clipper else None
    layout = adapter.layout(model.dims)
    with count_collectives() as calls:
        if made is not None:
            norm = made.clip_().total_norm
        else:
            norm = clip_grad_norm_(parameters, total / 4, layout=layout)
    assert_one_all_reduce(calls)
    assert_norm(norm, total)
    assert len(before) >= len(calls)
    if sum(degree > 1 for degree in degrees.values()) > 1 and "dp_replicate" not in degrees:
        assert len(before) > len(calls)
    for one, was in zip(parameters, old, strict=True):
        torch.testing.assert_close(local_of(one.grad), was / 4, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("clipper", [False, True], ids=["function", "clipper"])
@pytest.mark.parametrize("degrees", DEGREES)
@on_ranks(4)
def test_the_same_norm_with_fewer_collectives(degrees, clipper):
    check(DEGREES[degrees], clipper)


@pytest.mark.parametrize("clipper", [False, True], ids=["function", "clipper"])
@on_ranks(8)
def test_fsdp_tp_and_pp_together(clipper):
    check({"pp": 2, "dp_shard": 2, "tp": 2}, clipper)


def test_what_is_no_parallel_dims_is_rejected():
    with pytest.raises(TypeError, match="ParallelDims, got int"):
        adapter.layout(4)
