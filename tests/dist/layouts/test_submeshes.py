"""DTensors on a part of a root mesh: copies on the left-out ranks, or other parameters there."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardclip import GradClipper, ReplicaMismatchError, clip_grad_norm_
from tests.ranks import count_collectives, everywhere, on_ranks, raised_everywhere
from tests.ranks.tensors import (
    S0,
    S1,
    R,
    Sharded,
    exact_norm,
    local_of,
    mesh_of,
    mesh_over,
    parameter,
    sharded,
    strided,
)
from tests.ranks.unsharded import (
    CLIPS,
    assert_clips_as_unsharded,
    assert_gradient,
    assert_norm,
    assert_one_all_reduce,
)
from tests.ranks.warned import recorded

BOTH = pytest.mark.parametrize("clip", CLIPS)
POWERS = pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
UNFLATTENS = pytest.mark.skipif(
    not hasattr(DeviceMesh, "_unflatten"),
    reason=f"torch {torch.__version__} cannot unflatten a device mesh",
)


def dp_tp():
    return mesh_of(2, 2, names=("dp", "tp"))


def stage_own():
    """Names of its own: to torch's caches a slice of another root would be the same mesh."""
    return mesh_of(2, 2, names=("stage", "own"))


def pp_dp():
    return mesh_of(2, 2, names=("pp", "dp"))


@BOTH
@POWERS
@on_ranks(4)
def test_parameters_outside_the_tensor_parallel_plan_count_once(clip, norm_type):
    root = dp_tp()
    tensors = [
        Sharded(torch.randn(8, 4), root, (strided(0, 2), S0)),
        Sharded(torch.randn(8, 4), root, (S0, S1)),
        Sharded(torch.randn(8), root, (S0, R)),
        Sharded(torch.randn(5, 4), root["dp"], (S0,)),
        Sharded(torch.randn(1), root["dp"], (S0,)),
        Sharded(torch.randn(6), root["dp"], (R,)),
        Sharded(torch.randn(6), root["tp"], (S0,)),
    ]
    assert_clips_as_unsharded(tensors, norm_type, CLIPS[clip])


@BOTH
@POWERS
@on_ranks(4)
def test_pipeline_stages_hold_other_parameters(clip, norm_type):
    """Stage 0 has two parameters, stage 1 has three, and none is a copy."""
    root = pp_dp()
    stages = [[torch.randn(5, 3), torch.randn(4)], [torch.randn(5, 3) * 3, *torch.randn(2, 4)]]
    mine = [Sharded(full, root["dp"], (S0,)) for full in stages[root.get_local_rank("pp")]]
    made = [parameter(tensor.build()) for tensor in mine]
    expected = exact_norm([*stages[0], *stages[1]], norm_type)
    assert_norm(CLIPS[clip](made, expected / 2, norm_type), expected)
    for one, tensor in zip(made, mine, strict=True):
        assert_gradient(one, tensor, 0.5)


@on_ranks(8)
def test_three_axes_pp_dp_tp():
    """Over tp the left-out ranks hold copies, over pp other parameters; flattened axes too."""
    root = mesh_of(2, 2, 2, names=("pp", "dp", "tp"))
    stage = root.get_local_rank("pp")
    fulls = torch.randn(2, 3, 8, 4)
    places = [
        (root["dp", "tp"], (strided(0, 2), S0)),
        (root["dp"], (S0,)),
        (root["dp", "tp"]._flatten("dp_tp"), (S0,)),
    ]
    mine = [Sharded(f, *place) for f, place in zip(fulls[stage], places, strict=True)]
    expected = exact_norm([fulls])
    for clip in CLIPS.values():
        made = [parameter(tensor.build()) for tensor in mine]
        assert_norm(clip(made, expected / 2, 2.0), expected)
        for one, tensor in zip(made, mine, strict=True):
            assert_gradient(one, tensor, 0.5)


@BOTH
@on_ranks(4)
def test_flattened_axes(clip):
    root = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    flat = root["replicate", "shard"]._flatten("dp")
    tensors = [
        Sharded(torch.randn(7, 2), flat, (S0,)),
        Sharded(torch.randn(7, 2), root, (R, S0, S1)),
    ]
    assert_clips_as_unsharded(tensors, clip=CLIPS[clip])


@UNFLATTENS
@BOTH
@on_ranks(4)
def test_unflattened_axes(clip):
    """As torchtitan builds its meshes: the root knows only the axis `world`."""
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (2, 2), ("dp", "tp"))
    tensors = [
        Sharded(torch.randn(7, 2), dense["dp"], (S0,)),
        Sharded(torch.randn(8, 2), dense, (strided(0, 2), S0)),
        Sharded(torch.randn(3), world, (S0,)),
    ]
    assert_clips_as_unsharded(tensors, clip=CLIPS[clip])


@UNFLATTENS
@pytest.mark.parametrize("names", [True, False])
@on_ranks(4)
def test_unflattened_pipeline_stages_are_never_silently_wrong(names):
    """The pp axis' name may be lost; parameters' names then tell the stages apart."""
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (2, 2), ("pp", "dp"))
    stage = dense.get_local_rank("pp")
    fulls = torch.randn(2, 6)
    made = parameter(sharded(fulls[stage], dense["dp"], (S0,)))
    if names:
        clipper = GradClipper([(f"layers.{stage}", made)], 1e9)
        assert_norm(clipper.clip_().total_norm, exact_norm([fulls]))
        return
    outcome = everywhere(norm_or_error(made))
    assert all(one == outcome[0] for one in outcome), outcome
    right = pytest.approx(exact_norm([fulls]), rel=1e-6)
    assert outcome[0] == right or "layout" in str(outcome[0]), outcome


def norm_or_error(made) -> float | str:
    try:
        return clip_grad_norm_([made], 1e9).item()
    except ReplicaMismatchError as error:
        return str(error)


@on_ranks(4, fresh=True)
def test_two_separate_meshes_add_up_with_one_warning():
    """Nothing says that the other two ranks hold another part, so the call says what it took."""
    meshes = mesh_over(0, 1), mesh_over(2, 3)
    stage = dist.get_rank() // 2
    full = torch.tensor([[3.0, 0.0], [0.0, 4.0]][stage])
    with recorded() as messages:
        for _ in range(3):
            made = parameter(sharded(full, meshes[stage], (S0,)))
            assert_norm(clip_grad_norm_([made], 100.0), 5.0)
    about = [message for message in messages if "layout=" in message]
    assert len(about) == 1, messages
    assert "group=" in about[0]
    assert messages == about


@on_ranks(4)
def test_a_layout_on_the_root_mesh_settles_what_a_sub_mesh_leaves_open():
    root = stage_own()
    fulls = torch.randn(2, 6)
    mine = Sharded(fulls[root.get_local_rank("stage")], root["own"], (S0,))
    expected = exact_norm([fulls])

    def layout(tensor):
        return root, [S0, S0]

    for clip in CLIPS.values():
        made = parameter(mine.build())
        assert_norm(clip([made], expected / 2, 2.0, layout=layout), expected)
        assert_gradient(made, mine, 0.5)


@BOTH
@on_ranks(4)
def test_a_layout_says_copies_where_the_axis_is_named_pp(clip):
    """A parameter that every stage shares: the pp axis' meaning is overruled."""
    tensor = Sharded(torch.randn(6), pp_dp()["dp"], (S0,))
    assert_clips_as_unsharded([tensor], clip=CLIPS[clip], layout=lambda tensor: (pp_dp(), [R, S0]))


@BOTH
@on_ranks(4)
def test_left_out_ranks_that_hold_something_else_are_found(clip):
    """Over an axis that is not named pp they should be copies."""
    root = dp_tp()
    full = torch.randn(2, 6)[root.get_local_rank("tp")]
    module = torch.nn.ParameterDict({"scale": parameter(sharded(full, root["dp"], (S0,)))})
    before = local_of(module["scale"].grad).clone()
    raised_everywhere(
        lambda: CLIPS[clip](module, 1e-3, 2.0), ReplicaMismatchError, "scale", "layout"
    )
    assert torch.equal(local_of(module["scale"].grad), before)


@on_ranks(4)
def test_a_clipper_tells_stages_apart_by_their_names():
    """No axis is named pp, but other names mean other parameters."""
    root = stage_own()
    stage = root.get_local_rank("stage")
    fulls = torch.randn(2, 6)
    made = parameter(sharded(fulls[stage], root["own"], (S0,)))
    shared = parameter(sharded(torch.ones(4), root["own"], (S0,)))
    clipper = GradClipper([(f"layers.{stage}.weight", made), ("norm.weight", shared)], 1e9)
    with count_collectives() as calls:
        norm = clipper.clip_().total_norm
    assert_one_all_reduce(calls)
    assert_norm(norm, exact_norm([fulls, torch.ones(4)]))


@pytest.mark.parametrize("other", ["shape", "dtype"])
@on_ranks(4)
def test_a_clipper_tells_stages_apart_by_shape_and_dtype(other):
    root = stage_own()
    stage = root.get_local_rank("stage")
    fulls = [torch.randn(6), torch.randn(8)]
    if other == "dtype":
        fulls[1] = fulls[1][:6].bfloat16()
    made = parameter(sharded(fulls[stage], root["own"], (S0,)))
    norm = GradClipper([("weight", made)], 1e9).clip_().total_norm
    assert_norm(norm, exact_norm(fulls))


@on_ranks(4, fresh=True)
def test_same_names_on_several_stages_add_up_with_one_warning():
    """They may be tied (then a layout is wanted) or just numbered alike on each stage."""
    fulls = torch.randn(2, 6)
    made = parameter(sharded(fulls[pp_dp().get_local_rank("pp")], pp_dp()["dp"], (S0,)))
    with recorded() as messages:
        clipper = GradClipper([("embed.weight", made)], 1e9)
        norms = [clipper.clip_().total_norm for _ in range(3)]
    assert_norm(norms[0], exact_norm([fulls]))
    about = [message for message in messages if "embed.weight" in message]
    assert len(about) == 1, messages
    assert "layout=" in about[0]


@on_ranks(4)
def test_norms_of_same_names_on_another_stage_have_the_stage_in_the_key():
    root = pp_dp()
    stage = root.get_local_rank("pp")
    fulls = torch.tensor([[3.0, 4.0], [5.0, 12.0]])
    pairs = [("0.weight", parameter(sharded(fulls[stage], root["dp"], (S0,))))]
    own = torch.tensor([6.0 + 2 * stage])
    pairs.append((f"only{stage}", parameter(sharded(own, root["dp"], (S0,)))))
    with recorded():
        result = GradClipper(pairs, 1e9, norms="parameter").clip_()
    assert {name: round(float(norm), 4) for name, norm in result.norms.items()} == {
        "0.weight": 5.0,
        "0.weight@pp1": 13.0,
        "only0": 6.0,
        "only1": 8.0,
    }
