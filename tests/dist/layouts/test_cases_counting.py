"""Faults that users met in how elements are counted, each as a small input with its answer."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from shardclip import SELF, ReplicaMismatchError, clip_grad_norm_
from tests.ranks import on_ranks, raised_everywhere
from tests.ranks.tensors import (
    S0,
    R,
    Sharded,
    labelled,
    local_of,
    mesh_of,
    mesh_over,
    parameter,
    sharded,
)
from tests.ranks.unsharded import CLIPS, assert_clips_as_unsharded, assert_norm

F = torch.tensor
BOTH = pytest.mark.parametrize("clip", CLIPS)


def one_layout(mesh, *placements):
    return mesh, placements


def per_rank(*values):
    """This rank's own values."""
    return F(values[dist.get_rank()])


def assert_clipped(made, *expected):
    for one, values in zip(made, expected, strict=True):
        torch.testing.assert_close(local_of(one.grad), F(values), rtol=2e-6, atol=0)


@BOTH
@pytest.mark.parametrize("kind", ["DTensor", "plain"])
@on_ranks(2)
def test_shards_are_one_vector_not_two(clip, kind):
    # pytorch #72548, AReaL #312, SpecForge #663
    mesh = mesh_of(2)
    mine = per_rank([3.0], [4.0])
    grad = labelled(mine, mesh, Shard(0)) if kind == "DTensor" else mine
    options = {} if kind == "DTensor" else {"layout": one_layout(mesh, Shard(0))}
    made = parameter(grad)
    assert_norm(CLIPS[clip]([made], 1.0, 2.0, **options), 5.0)
    assert_clipped([made], per_rank([0.6], [0.8]).tolist())


@BOTH
@on_ranks(4)
def test_the_norm_is_not_a_partial_one(clip):
    # pytorch #170862, torchtitan #766, torchtune #2240, verl #3655
    made = parameter(sharded(F([1.0, 1, 3, 5]), mesh_of(4), [S0]))
    assert_norm(CLIPS[clip]([made], 3.0, 2.0), 6.0)
    assert_clipped([made], per_rank([0.5], [0.5], [1.5], [2.5]).tolist())


@BOTH
@on_ranks(4)
def test_replicas_of_hsdp_are_not_summed(clip):
    # VeOmni #184
    tensor = Sharded(F([3.0, 4]), mesh_of(2, 2), (R, S0))
    assert_clips_as_unsharded([tensor], clip=CLIPS[clip], share=0.2)


@BOTH
@on_ranks(2)
def test_a_replicated_weight_beside_tensor_parallel_shards_counts_once(clip):
    # NeMo-RL #3788
    mesh = mesh_of(2)
    made = [parameter(sharded(F([3.0, 4]), mesh, [S0])), parameter(sharded(F([12.0]), mesh, [R]))]
    assert_norm(CLIPS[clip](made, 1.0, 2.0), 13.0)
    assert_clipped(made, per_rank([3 / 13], [4 / 13]).tolist(), [12 / 13])


@BOTH
@on_ranks(2)
def test_experts_add_up_and_the_dense_part_counts_once(clip):
    # DeepSpeed #8469, Automodel #3816
    expert = parameter(per_rank([1.0, 2, 2], [0.0, 4, 0]))
    dense = parameter(F([12.0]))
    where = one_layout(mesh_of(2), Shard(0))

    def layout(tensor):
        return where if tensor.numel() == 3 else None

    assert_norm(CLIPS[clip]([expert, dense], 6.5, 2.0, layout=layout), 13.0)
    assert_clipped([expert, dense], per_rank([0.5, 1, 1], [0.0, 2, 0]).tolist(), [6.0])


@BOTH
@on_ranks(4)
def test_experts_that_are_replicated_over_data_parallel_ranks(clip):
    mesh = mesh_of(2, 2, names=("ep", "edp"))
    expert = parameter(F([1.0, 2, 2]) if dist.get_rank() < 2 else F([0.0, 4, 0]))
    dense = parameter(F([12.0]))

    def layout(tensor):
        return (mesh, [Shard(0), Replicate()]) if tensor.numel() == 3 else None

    assert_norm(CLIPS[clip]([expert, dense], 6.5, 2.0, layout=layout), 13.0)
    assert_clipped([dense], [6.0])


@BOTH
@on_ranks(2)
def test_pipeline_stages_add_up(clip):
    # torchtitan #596, pytorch #162638
    made = parameter(per_rank([3.0], [4.0]))
    layout = one_layout(mesh_of(2, names=("pp",)), Shard(0))
    assert_norm(CLIPS[clip]([made], 1.0, 2.0, layout=layout), 5.0)
    assert_clipped([made], per_rank([0.6], [0.8]).tolist())


@BOTH
@on_ranks(2)
def test_two_stage_parts_on_one_rank(clip):
    made = [parameter(F([3.0])), parameter(F([4.0]))]
    norm = clip_grad_norm_(made, 1.0, group=SELF)
    assert_norm(norm, 5.0)
    assert_clipped(made, [0.6], [0.8])


@BOTH
@pytest.mark.parametrize("own", [0, 1])
@on_ranks(4)
def test_a_tied_embedding_on_first_and_last_stage_counts_once(clip, own):
    # Megatron-LM #7227
    stages, ends = mesh_of(4, names=("pp",)), mesh_over(0, 3)
    rank = dist.get_rank()
    # Every stage may have its own parameter; only one stage's is not empty here.
    other = parameter(F([12.0]) if rank == own else F([0.0]))
    tied = [parameter(F([3.0, 4]))] if rank in (0, 3) else []

    def layout(tensor):
        return (ends, [Replicate()]) if tensor.numel() == 2 else (stages, [Shard(0)])

    norm = CLIPS[clip]([*tied, other], 6.5, 2.0, layout=layout)
    assert_norm(norm, 13.0)
    assert_clipped(tied, *([[1.5, 2.0]] * len(tied)))


@BOTH
@pytest.mark.parametrize("kind", ["DTensor", "plain"])
@on_ranks(2)
def test_a_parameter_listed_twice_counts_once_and_is_scaled_once(clip, kind):
    grad = F([3.0, 4])
    made = parameter(sharded(grad, mesh_of(2), [S0]) if kind == "DTensor" else grad)
    assert_norm(CLIPS[clip]([made, made], 1.0, 2.0), 5.0)
    expected = [0.6, 0.8]
    assert_clipped([made], expected if kind == "plain" else per_rank([0.6], [0.8]).tolist())


@pytest.mark.parametrize("through", ["function", "clipper"])
@on_ranks(4)
def test_a_partial_gradient_is_refused(through):
    mine = per_rank([0.5, 0.5], [0.5, 1.5], [1.0, 1], [1.0, 1])
    made = parameter(labelled(mine, mesh_of(4, names=("tp",)), Partial()))
    raised_everywhere(
        lambda: CLIPS[through]([made], 1.0, 2.0), ValueError, "Partial", "reduce", "tp"
    )
    assert torch.equal(local_of(made.grad), mine)


@BOTH
@on_ranks(2)
def test_replicas_that_drifted_are_found(clip):
    # FastVideo #1666
    module = torch.nn.ParameterDict({"gate": parameter(per_rank([3.0], [4.0]))})
    module["gate"] = parameter(labelled(per_rank([3.0], [4.0]), mesh_of(2), Replicate()))
    raised_everywhere(
        lambda: CLIPS[clip](module, 1.0, 2.0), ReplicaMismatchError, "gate", "rank", r"\b0\b.*1"
    )
    assert_clipped([module["gate"]], per_rank([3.0], [4.0]).tolist())


@BOTH
@pytest.mark.parametrize(
    ("norm_type", "norm"), [(2.0, 11.18034), (1.0, 19.0), (math.inf, 10.0), (0.0, 5.0)]
)
@on_ranks(4)
def test_an_empty_uneven_shard(clip, norm_type, norm):
    full = F([1.0, 2, 2, 4, 10])
    tensor = Sharded(full, mesh_of(4), (S0,))
    assert tensor.build().to_local().numel() == (2, 2, 1, 0)[dist.get_rank()]
    made = parameter(tensor.build())
    assert_norm(CLIPS[clip]([made], 1.0, norm_type), norm, rtol=1e-6)
    expected = Sharded(full / norm, tensor.mesh, tensor.placements).build()
    assert_clipped([made], local_of(expected).tolist())


@BOTH
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@on_ranks(4)
def test_a_rank_without_gradient_joins_and_gets_the_norm(clip, norm_type):
    # torchtitan #1541, DeepSpeed PR #8478
    made = parameter(sharded(F([1.0, 1, 3, 5]), mesh_of(4), [S0]))
    if dist.get_rank() == 3:
        made.grad = None
    norm = {1.0: 5.0, 2.0: math.sqrt(11), math.inf: 3.0}[norm_type]
    assert_norm(CLIPS[clip]([made], 1.0, norm_type), norm)
    if dist.get_rank() == 3:
        assert made.grad is None
    else:
        assert_clipped([made], [(1.0, 1.0, 3.0)[dist.get_rank()] / norm])


@BOTH
@on_ranks(2)
def test_a_dtensor_beside_a_plain_replicated_tensor(clip):
    # torchtune #2420, transformers #36132, #48208, accelerate #4219
    tensors = [Sharded(F([3.0, 0, 0, 4]), mesh_of(2), (S0,)), Sharded(F([0.0, 12]))]
    assert_clips_as_unsharded(tensors, clip=CLIPS[clip])


@BOTH
@pytest.mark.parametrize("sub", ["slice", "own"])
@on_ranks(4)
def test_a_mesh_of_all_ranks_beside_a_mesh_of_two(clip, sub):
    # pytorch #180346, cosmos-rl #117
    root = mesh_of(2, 2, names=("dp", "tp"))
    small = root["tp"] if sub == "slice" else mesh_over(1, 2)
    tensors = [
        Sharded(F([3.0, 0, 0, 4]), mesh_of(4), (S0,)),
        Sharded(F([0.0, 12]), small, (S0,)),
    ]
    assert_clips_as_unsharded(tensors, clip=CLIPS[clip])
