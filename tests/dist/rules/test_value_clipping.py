"""Clipping element by element and tensor by tensor, under sharding."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import shardclip
from shardclip import PerTensorClipper, clip_grad_per_tensor_norm_, clip_grad_value_
from tests.dist.costs.test_unread_lanes import as_on_a_device
from tests.ranks import count_collectives, on_ranks, raised_everywhere, same_everywhere
from tests.ranks.clippers import here, shard
from tests.ranks.tensors import S0, labelled, local_of, mesh_of, parameter, sharded
from tests.ranks.unsharded import assert_one_all_reduce

FULL = {
    "large": torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 30,
    "bias": torch.tensor([3.0, -4.0, 0.0, 12.0]),
    "small": torch.tensor([[0.1, 0.2], [0.3, 0.4]]),
}
LAYOUTS = {
    "rows": [Shard(0)],
    "columns": [Shard(-1)],
    "copies": [Replicate()],
}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
FOREACH = pytest.mark.parametrize("foreach", [None, True, False])


def laid_out(layout: str) -> dict[str, nn.Parameter]:
    mesh = mesh_of(2)
    held = {}
    for name, full in FULL.items():
        (placement,) = LAYOUTS[layout]
        dim = placement.dim % full.dim() if isinstance(placement, Shard) else None
        where = placement if dim is None else Shard(dim)
        held[name] = parameter(sharded(full, mesh, [where]))
    return held


def assert_pieces_of(held: dict[str, nn.Parameter], expected: dict[str, torch.Tensor]) -> None:
    for name, made in held.items():
        mine = sharded(expected[name], made.grad.device_mesh, made.grad.placements)
        torch.testing.assert_close(local_of(made.grad), local_of(mine), rtol=1e-6, atol=0)


@FOREACH
@LAYOUT
@on_ranks(2)
def test_values_are_clipped_as_torch_clips_the_whole(layout, foreach):
    held = laid_out(layout)
    whole = [parameter(full.clone()) for full in FULL.values()]
    nn.utils.clip_grad_value_(whole, 3.5)
    with count_collectives() as calls:
        clip_grad_value_(held.items(), 3.5, foreach)
    assert not calls
    assert any((full.abs() > 3.5).any() for full in FULL.values())
    assert_pieces_of(held, {name: made.grad for name, made in zip(FULL, whole, strict=True)})


@FOREACH
def test_values_of_many_kinds(foreach):
    low = parameter(torch.tensor([3.0, -0.5, math.nan, -math.inf], dtype=torch.bfloat16))
    double, none = parameter(torch.tensor([9.0, 1.0]).double()), nn.Parameter(torch.zeros(2))
    twice = torch.sparse_coo_tensor([[0, 0, 2]], [1.5, 1.5, -5.0], (4,), check_invariants=True)
    sparse = nn.Parameter(torch.zeros(4))
    sparse.grad = twice
    clip_grad_value_([low, none, double, sparse], 2, foreach)
    assert low.grad[[0, 1, 3]].tolist() == [2.0, -0.5, -2.0]
    assert low.grad[2].isnan()
    assert double.grad.tolist() == [2.0, 1.0]
    assert none.grad is None
    assert sparse.grad.to_dense().tolist() == [2.0, 0.0, -2.0, 0.0]  # 1.5 + 1.5 is above 2


def test_an_infinite_value_clips_nothing():
    made = parameter(torch.tensor([math.inf, 1.0]))
    clip_grad_value_(made, math.inf)
    assert made.grad.tolist() == [math.inf, 1.0]


@pytest.mark.parametrize("value", [-1.0, math.nan, "much"])
def test_a_wrong_value_is_refused(value):
    with pytest.raises(ValueError, match="clip_value must be"):
        clip_grad_value_([], value)


@on_ranks(2)
def test_values_that_are_still_to_be_summed_are_refused():
    good = shard([30.0, 40.0])
    bad = parameter(labelled(torch.ones(2), mesh_of(2), Partial()))
    raised_everywhere(
        lambda: clip_grad_value_([("g", good), ("b", bad)], 1.0), ValueError, "^b: Partial"
    )
    assert local_of(good.grad).tolist() == here([30.0], [40.0])


def test_complex_values_are_refused():
    made = parameter(torch.tensor([1 + 2j]))
    with pytest.raises(ValueError, match=r"parameters\[0\]: it is complex"):
        clip_grad_value_([made], 1.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@LAYOUT
@on_ranks(2)
def test_each_tensor_is_clipped_by_its_own_norm(layout, norm_type):
    held = laid_out(layout)
    norms = clip_grad_per_tensor_norm_(held.items(), 2.0, norm_type)
    expected, clipped = {}, []
    for name, full in FULL.items():
        norm = float(full.double().norm(norm_type))
        assert float(norms[name]) == pytest.approx(norm, rel=1e-6)
        expected[name] = full * min(1.0, 2.0 / (norm + 1e-6))
        clipped.append(norm > 2)
    assert set(clipped) == {True, False}
    assert same_everywhere([float(norm).hex() for norm in norms.values()])
    assert_pieces_of(held, expected)


@pytest.mark.parametrize("device", [False, True])
@on_ranks(2)
def test_by_hand_in_a_loop_of_one_all_reduce_a_step(device):
    # As in the docstring: norms 5 and 0.1, and max_norm 1.
    one, two = shard([3.0, 4.0]), shard([0.1, 0.0])
    clipper = PerTensorClipper([("one", one), ("two", two)], 1.0)
    with as_on_a_device() if device else pytest.MonkeyPatch.context():
        for size in (1.0, 2.0):
            one.grad, two.grad = shard([3.0 * size, 4.0 * size]).grad, shard([0.1, 0.0]).grad
            with count_collectives() as calls:
                norms = clipper.clip_()
            assert_one_all_reduce(calls)
            assert float(norms["one"]) == pytest.approx(5 * size)
            assert local_of(one.grad).tolist() == pytest.approx(here([0.6], [0.8]), rel=1e-5)
            assert local_of(two.grad).tolist() == pytest.approx(here([0.1], [0.0]))


@on_ranks(2)
def test_the_root_of_the_mean_square_of_each_tensor():
    # optax.clip_by_block_rms: x / max(1, rms(x) / threshold). [3 4 0 12]: rms = 13 / 2.
    made = shard([3.0, 4.0, 0.0, 12.0])
    clip_grad_per_tensor_norm_([("w", made)], lambda p: 1.3 * p.numel() ** 0.5)
    assert local_of(made.grad).tolist() == pytest.approx(here([0.6, 0.8], [0.0, 2.4]), rel=1e-5)


@on_ranks(2)
def test_tensors_that_one_rank_alone_holds():
    mesh = mesh_of(2)
    held = [("shared", parameter(sharded(torch.tensor([3.0, 4.0]), mesh, [S0])))]
    if dist.get_rank():
        held.append(("mine", parameter(torch.tensor([6.0, 8.0]))))
    norms = clip_grad_per_tensor_norm_(held, 1.0)
    assert {name: float(norm) for name, norm in norms.items()} == pytest.approx(
        {"shared": 5.0, "mine": 10.0}
    )
    if dist.get_rank():
        assert held[1][1].grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


@on_ranks(2)
def test_a_nan_stays_in_its_own_tensor():
    one, two = shard([math.nan, 4.0]), shard([6.0, 8.0])
    norms = clip_grad_per_tensor_norm_([("one", one), ("two", two)], 5.0)
    assert math.isnan(norms["one"])
    assert local_of(one.grad).isnan().all()
    assert local_of(two.grad).tolist() == pytest.approx(here([3.0], [4.0]), rel=1e-5)


@on_ranks(2)
def test_another_threshold_on_one_rank():
    made = shard([3.0, 4.0])
    raised_everywhere(
        lambda: clip_grad_per_tensor_norm_([("w", made)], here(1.0, 2.0)),
        ValueError,
        "max_norm of each tensor= differs",
    )
    assert local_of(made.grad).tolist() == here([3.0], [4.0])


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, lambda parameter: -1.0])
def test_a_wrong_threshold_is_refused(max_norm):
    made = parameter(torch.tensor([3.0, 4.0]))
    with pytest.raises(ValueError, match="must be >= 0"):
        clip_grad_per_tensor_norm_([made], max_norm)
    assert made.grad.tolist() == [3.0, 4.0]


def test_the_names_are_public():
    for name in ("PerTensorClipper", "clip_grad_per_tensor_norm_", "clip_grad_value_"):
        assert name in shardclip.__all__
