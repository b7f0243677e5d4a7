"""Unit-wise adaptive gradient clipping: units whole, and units split over ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Partial, Replicate, Shard

from shardclip import AdaptiveGradClipper, adaptive_clip_grad_
from tests.dist.costs.test_unread_lanes import as_on_a_device
from tests.ranks import count_collectives, on_ranks, raised_everywhere
from tests.ranks.clippers import here
from tests.ranks.tensors import labelled, local_of, mesh_of, sharded, strided

S0, S1, R = Shard(0), Shard(1), Replicate()


def random(*shape: int, seed: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def pair(weight, grad, mesh=None, placements=()) -> nn.Parameter:
    if mesh is not None:
        weight, grad = sharded(weight, mesh, placements), sharded(grad, mesh, placements)
    made = nn.Parameter(weight)
    made.grad = grad.clone()
    return made


def unsharded(weight, grad, clip_factor=0.01, eps=1e-3) -> torch.Tensor:
    """The paper's formula on whole tensors in float64, row by row."""
    rows = (-1, 1) if weight.dim() > 1 else (1, -1)
    view = (weight.shape[0], -1) if weight.dim() > 1 else rows
    w, g = weight.double().reshape(view), grad.double().reshape(view)
    limit = clip_factor * w.norm(dim=1, keepdim=True).clamp(min=eps)
    norm = g.norm(dim=1, keepdim=True)
    return torch.where(norm > limit, g * limit / norm, g).reshape(grad.shape)


def test_by_hand_on_one_process():
    # Rows of w: norms 5 and 0, which counts 0.1. Rows of g: norms 50 and 1. With clip_factor 0.5
    # the limits are 2.5 and 0.05: the first is divided by 20, the second too. The bias: norm 13,
    # limit 6.5, norm of its gradient 6: left alone.
    weight = pair(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[30.0, 40.0], [0.6, 0.8]]))
    bias = pair(torch.tensor([5.0, 12.0]), torch.tensor([0.0, 6.0]))
    total = adaptive_clip_grad_([weight, bias], 0.5, 0.1)
    torch.testing.assert_close(weight.grad, torch.tensor([[1.5, 2.0], [0.03, 0.04]]))
    assert bias.grad.tolist() == [0.0, 6.0]
    assert float(total) == pytest.approx(math.sqrt(50**2 + 1 + 36))


@on_ranks(2)
def test_by_hand_where_rows_are_split():
    # As in the docstring: columns [3] and [4], gradients [30] and [40]: norms 5 and 50.
    made = pair(torch.tensor([[3.0, 4.0]]), torch.tensor([[30.0, 40.0]]), mesh_of(2), [S1])
    adaptive_clip_grad_([("w", made)], 1.0)
    assert local_of(made.grad).flatten().tolist() == pytest.approx(here([3.0], [4.0]), rel=1e-6)


SHAPES = {"linear": (6, 5), "odd": (5, 3), "conv": (4, 3, 2, 2), "vector": (7,), "number": ()}


def assert_as_unsharded(mesh, layouts, dtype=torch.float32, rtol=1e-6) -> int:
    """Clip tensors of all shapes under all these layouts at once; how many all-reduces it took."""
    held = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        weight = random(*shape, seed=index, dtype=dtype)
        grad = random(*shape, seed=100 + index, dtype=dtype) * 0.02
        for number, placements in enumerate(layouts):
            fits = [R if not isinstance(p, Shard) or p.dim >= len(shape) else p for p in placements]
            made = pair(weight, grad, mesh, fits)
            held[f"{name}{number}"] = made, unsharded(weight, grad), grad
    clipper = AdaptiveGradClipper([(name, made) for name, (made, *_) in held.items()])
    with count_collectives() as calls:
        clipper.clip_()
    assert {call.op for call in calls} == {"all_reduce"}
    for name, (made, expected, grad) in held.items():
        mine = sharded(expected.to(dtype), mesh, made.grad.placements)
        assert not torch.equal(expected.to(dtype), grad), name  # it did clip
        torch.testing.assert_close(local_of(made.grad), local_of(mine), rtol=rtol, atol=1e-30)
    return len(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@on_ranks(2)
def test_one_axis(dtype):
    assert assert_as_unsharded(mesh_of(2), [[S0], [S1], [R]], dtype) == 2


@on_ranks(2)
def test_low_precision():
    assert_as_unsharded(mesh_of(2), [[S0], [S1], [R]], torch.bfloat16, rtol=2**-7)


@on_ranks(4)
def test_two_axes():
    layouts = [[S0, S1], [S1, S0], [R, S1], [S1, R], [S0, S0], [S0, R], [S1, S1]]
    assert assert_as_unsharded(mesh_of(2, 2), layouts) == 2


@on_ranks(4)
def test_copies_of_a_split_row_count_once():
    # Zero weights count eps: the limit is 0.5 * 0.1, the gradient's norm 5, on both replicas.
    grad = torch.tensor([[3.0, 4.0]])
    made = pair(torch.zeros(1, 2), grad, mesh_of(2, 2), [R, S1])
    adaptive_clip_grad_([("w", made)], 0.5, 0.1)
    expected = here(0.03, 0.04, 0.03, 0.04)
    assert local_of(made.grad).item() == pytest.approx(expected, rel=1e-6)


@on_ranks(4)
def test_rows_cut_by_fsdp_after_tensor_parallelism():
    mesh = mesh_of(2, 2)
    weight, grad = random(8, 3, seed=0), random(8, 3, seed=1)
    made = pair(weight, grad, mesh, [strided(0, 2), S0])
    adaptive_clip_grad_([("w", made)])
    mine = sharded(unsharded(weight, grad).float(), mesh, made.grad.placements)
    torch.testing.assert_close(local_of(made.grad), local_of(mine), rtol=1e-6, atol=0)


@on_ranks(2)
def test_whole_rows_need_no_second_all_reduce():
    made = pair(random(4, 3, seed=0), random(4, 3, seed=1), mesh_of(2), [S0])
    clipper = AdaptiveGradClipper([("w", made)])
    with count_collectives() as calls:
        clipper.clip_()
    assert [call.op for call in calls] == ["all_reduce"]


@on_ranks(2)
def test_on_a_device_nothing_is_read():
    weight, grad = random(4, 6, seed=0), random(4, 6, seed=1)
    made = pair(weight, grad, mesh_of(2), [S1])
    clipper = AdaptiveGradClipper([("w", made)])
    with as_on_a_device():
        for _ in range(2):
            made.grad = sharded(grad, mesh_of(2), [S1])
            clipper.clip_()
            mine = sharded(unsharded(weight, grad).float(), mesh_of(2), [S1])
            torch.testing.assert_close(local_of(made.grad), local_of(mine), rtol=1e-6, atol=0)


@on_ranks(2)
def test_plain_tensors_with_a_layout():
    weight, grad = random(4, 6, seed=0), random(4, 6, seed=1)
    rank = dist.get_rank()
    made = pair(weight.chunk(2, 1)[rank].clone(), grad.chunk(2, 1)[rank])
    adaptive_clip_grad_([("w", made)], layout=(mesh_of(2), [S1]))
    expected = unsharded(weight, grad).float().chunk(2, 1)[rank]
    torch.testing.assert_close(made.grad, expected, rtol=1e-6, atol=0)


@on_ranks(2)
def test_a_parameter_of_one_rank_alone_and_one_without_a_gradient_here():
    weight, grad = torch.tensor([[3.0, 4.0]]), torch.tensor([[30.0, 40.0]])
    split = pair(weight, grad, mesh_of(2), [S1])
    held = [("split", split)]
    if dist.get_rank():
        held.append(("mine", pair(weight.clone(), grad)))
    else:
        split.grad = None
    # Of the gradient only 40 is there; the weights' norm is still 5.
    adaptive_clip_grad_(held, 1.0)
    if dist.get_rank():
        assert local_of(split.grad).item() == pytest.approx(5.0)
        assert held[1][1].grad.flatten().tolist() == pytest.approx([3.0, 4.0])


@on_ranks(2)
def test_a_nan_stays_in_its_own_row():
    grad = torch.tensor([[math.nan, 4.0], [30.0, 40.0]])
    made = pair(torch.tensor([[3.0, 4.0], [3.0, 4.0]]), grad, mesh_of(2), [S1])
    adaptive_clip_grad_([("w", made)], 1.0)
    assert local_of(made.grad)[1].item() == pytest.approx(here(3.0, 4.0))
    assert math.isnan(local_of(made.grad)[0].item()) == here(True, False)


@on_ranks(2)
def test_complex_rows():
    weight, grad = torch.tensor([[3.0, 4.0j]]), torch.tensor([[30.0j, 40.0]])
    made = pair(weight, grad, mesh_of(2), [S1])
    adaptive_clip_grad_([("w", made)], 1.0)
    torch.testing.assert_close(local_of(made.grad), here(grad[:, :1], grad[:, 1:]) / 10)


@on_ranks(2)
def test_another_factor_on_one_rank():
    made = pair(torch.ones(2), torch.ones(2), mesh_of(2), [S0])
    raised_everywhere(
        lambda: adaptive_clip_grad_([("w", made)], here(0.1, 0.2)), ValueError, "clip_factor= diff"
    )
    assert local_of(made.grad).tolist() == [1.0]


@on_ranks(2)
def test_what_cannot_be_clipped_on_one_rank_raises_on_all():
    mesh = mesh_of(2)
    made = pair(torch.ones(2), torch.ones(2), mesh, [S0])
    held = [("good", made)]
    if dist.get_rank():
        bad = nn.Parameter(torch.ones(2))
        bad.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
        held.append(("bad", bad))
    raised_everywhere(lambda: adaptive_clip_grad_(held), ValueError, "sparse", "rank 1")
    partial = pair(torch.ones(2), torch.ones(2), mesh, [S0])
    partial.grad = None
    partial = nn.Parameter(labelled(torch.ones(2), mesh, R))
    partial.grad = labelled(torch.ones(2), mesh, Partial())
    raised_everywhere(lambda: adaptive_clip_grad_([("p", partial)]), ValueError, "Partial")
    assert local_of(made.grad).tolist() == [1.0]


@on_ranks(2)
def test_fsdp1_is_refused():
    model = FullyShardedDataParallel(nn.Linear(3, 3), device_id=torch.device("cpu"))
    raised_everywhere(lambda: adaptive_clip_grad_(model), ValueError, "use FSDP2", "rank 1")


@pytest.mark.parametrize("wrong", [{"clip_factor": -1.0}, {"eps": math.nan}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ValueError, match="must be >= 0"):
        adaptive_clip_grad_([], **wrong)
