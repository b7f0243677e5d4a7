"""TensorFlow's functions: its values, its None entries, its NaN, under sharding too."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardclip import ReplicaMismatchError, clip_by_global_norm, global_norm
from tests.ranks import count_collectives, on_ranks, raised_everywhere
from tests.ranks.tensors import (
    S0,
    R,
    Sharded,
    assert_same_values,
    exact_norm,
    labelled,
    local_of,
    mesh_of,
    scaled,
    sharded,
)
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce

F = torch.tensor
PAIR = ([2.0, 3.0], [4.0, 5.0])


def rows(place: str, *values) -> list[torch.Tensor]:
    if place == "plain":
        return [F(value) for value in values]
    return [sharded(F(value), mesh_of(2), [S0 if place == "sharded" else R]) for value in values]


def here(place: str, values: list[float]) -> list[float]:
    return [values[dist.get_rank()]] if place == "sharded" else values


PLACES = pytest.mark.parametrize("place", ["plain", "sharded", "replicated"])


@PLACES
@pytest.mark.parametrize(
    ("clip_norm", "use_norm", "expected", "norm"),
    [
        (5.0, None, ([1.3608277, 2.0412416], [2.7216554, 3.402069]), 7.3484693),
        (50.0, None, PAIR, 7.3484693),
        (5.0, 10.0, ([1.0, 1.5], [2.0, 2.5]), 10.0),
        (0.0, None, ([0.0, 0.0], [0.0, 0.0]), 7.3484693),
        (7.3484693, None, PAIR, 7.3484693),
        (math.inf, None, PAIR, 7.3484693),
    ],
)
@on_ranks(2)
def test_tensorflows_values(place, clip_norm, use_norm, expected, norm):
    given = rows(place, *PAIR)
    use = None if use_norm is None else F(use_norm)
    with count_collectives() as calls:
        clipped, total = clip_by_global_norm(given, clip_norm, use)
    if use_norm is None:
        assert_one_all_reduce(calls)
    assert total.item() == pytest.approx(norm, rel=1e-6)
    assert type(total) is torch.Tensor
    assert isinstance(clipped, list)
    for got, values, old, before in zip(clipped, expected, given, PAIR, strict=True):
        assert type(got) is type(old)
        torch.testing.assert_close(local_of(got), F(here(place, values)), rtol=1e-6, atol=0)
        assert local_of(old).tolist() == here(place, before)  # not in place
        assert local_of(got).data_ptr() != local_of(old).data_ptr()


@on_ranks(2)
def test_use_norm_may_be_a_number():
    clipped, norm = clip_by_global_norm([F([2.0, 3.0])], 5.0, use_norm=10.0)
    assert float(norm) == 10.0
    torch.testing.assert_close(clipped[0], F([1.0, 1.5]))


@PLACES
@on_ranks(2)
def test_none_entries_stay_none(place):
    one, other = rows(place, *PAIR)
    clipped, norm = clip_by_global_norm([None, one, None, other], 5.0)
    assert [entry is None for entry in clipped] == [True, False, True, False]
    assert_norm(norm, math.sqrt(54))
    assert_norm(global_norm([None, one, None, other]), math.sqrt(54))


@on_ranks(2)
def test_one_rank_may_have_only_none():
    given = [None, None] if dist.get_rank() else [None, labelled(F([3.0, 4.0]), mesh_of(2), S0)]
    with count_collectives() as calls:
        clipped, norm = clip_by_global_norm(given, 1.0)
    assert_one_all_reduce(calls)
    assert_norm(norm, 5.0)
    assert (clipped[1] is None) == (dist.get_rank() == 1)


@PLACES
@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.inf])
@on_ranks(2)
def test_a_non_finite_norm_makes_every_element_nan(place, bad):
    clipped, norm = clip_by_global_norm(rows(place, [1.0, 2.0], [3.0, bad], [0.0, 0.0]), 5.0)
    assert math.isnan(norm.item()) == math.isnan(bad)
    assert not math.isfinite(norm.item())
    assert all(local_of(one).isnan().all() for one in clipped)


@on_ranks(2)
def test_a_non_finite_use_norm_makes_every_element_nan():
    clipped, _ = clip_by_global_norm([F([1.0, 2.0])], 5.0, use_norm=F(math.inf))
    assert clipped[0].isnan().all()


@on_ranks(2)
def test_an_empty_list():
    clipped, norm = clip_by_global_norm([], 5.0)
    assert clipped == []
    assert_norm(norm, 0.0)
    assert_norm(global_norm([]), 0.0)


@on_ranks(2)
def test_zeros_stay_zeros_without_epsilon():
    clipped, norm = clip_by_global_norm([torch.zeros(3)], 5.0)
    assert_norm(norm, 0.0)
    assert clipped[0].tolist() == [0, 0, 0]
    tiny = torch.full((4,), 1e-8)
    clipped, norm = clip_by_global_norm([tiny], 1e-8)
    torch.testing.assert_close(clipped[0], tiny / 2, rtol=1e-5, atol=0)


@pytest.mark.parametrize("function", [clip_by_global_norm, lambda one, _: global_norm(one)])
def test_a_single_tensor_is_refused(function):
    with pytest.raises(TypeError, match="list"):
        function(F([1.0, 2.0]), 5.0)


@on_ranks(2)
def test_duplicate_rows_of_a_sparse_tensor_are_summed():
    """TensorFlow counts them apart: 7.07 where the gradient's norm is 10."""
    rows = F([[3.0, 4.0], [3.0, 4.0]])
    sparse = torch.sparse_coo_tensor(F([[1, 1]]), rows, (3, 2), check_invariants=True)
    clipped, norm = clip_by_global_norm([sparse], 5.0)
    assert_norm(norm, 10.0)
    assert clipped[0].is_sparse
    torch.testing.assert_close(clipped[0].to_dense()[1], F([3.0, 4.0]))
    assert sparse.to_dense()[1].tolist() == [6, 8]


@PLACES
@pytest.mark.parametrize(
    ("dtype", "value", "pieces"), [(torch.float16, 300.0, 1), (torch.bfloat16, 0.01, 100)]
)
@on_ranks(2)
def test_low_precision_neither_overflows_nor_drifts(place, dtype, value, pieces):
    full = torch.full((10_000,), value, dtype=dtype)
    where = () if place == "plain" else (mesh_of(2), (S0 if place == "sharded" else R,))
    given = [Sharded(part, *where) for part in full.split(10_000 // pieces)]
    expected = exact_norm([full])
    clipped, norm = clip_by_global_norm([one.build() for one in given], 1.0)
    assert_norm(norm, expected)
    for one, got in zip(given, clipped, strict=True):
        assert got.dtype == dtype
        assert_same_values(local_of(got), local_of(one.build(scaled(one.full, 1 / expected))))


@on_ranks(2)
def test_huge_float32_values():
    clipped, norm = clip_by_global_norm([torch.full((100,), 1e20)], 1.0)
    assert_norm(norm, 1e21)
    torch.testing.assert_close(clipped[0], torch.full((100,), 0.1))


@on_ranks(2)
def test_layout_makes_plain_tensors_shards():
    mine = F([3.0] if dist.get_rank() == 0 else [4.0])
    clipped, norm = clip_by_global_norm([mine], 1.0, layout=(mesh_of(2), [S0]))
    assert_norm(norm, 5.0)
    torch.testing.assert_close(clipped[0], mine / 5)
    raised_everywhere(lambda: clip_by_global_norm([mine], 1.0), ReplicaMismatchError, "layout")
    raised_everywhere(lambda: global_norm([mine]), ReplicaMismatchError, "layout")


@pytest.mark.parametrize("clip_norm", [-1.0, math.nan])
@on_ranks(2)
def test_a_bad_clip_norm_is_refused_before_any_communication(clip_norm):
    with count_collectives() as calls, pytest.raises(ValueError, match="clip_norm"):
        clip_by_global_norm([F([3.0])], clip_norm)
    assert calls == []


@on_ranks(2)
def test_clipped_dtensors_keep_mesh_and_placements():
    given = sharded(torch.arange(5.0), mesh_of(2), [S0])
    (clipped,), _ = clip_by_global_norm([given], 1.0)
    assert isinstance(clipped, DTensor)
    assert clipped.placements == given.placements
    assert clipped.shape == given.shape
    torch.testing.assert_close(clipped.full_tensor(), torch.arange(5.0) / math.sqrt(30))
