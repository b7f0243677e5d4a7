"""The functions plan no more for parameters that they see again, until something changes."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate

from shardclip import ReplicaMismatchError, clip_grad_norm_, kept_plans, plan
from tests.ranks import count_collectives, on_ranks, raised_everywhere
from tests.ranks.models import loss_of, mlp
from tests.ranks.tensors import exact_norm, mesh_of, parameter, sharded
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce


class Planning:
    """Counts the plans that are made while it is entered."""

    def __enter__(self):
        self.plans, self._make = 0, plan.make
        plan.make = self._counted
        return self

    def _counted(self, *args, **options):
        self.plans += 1
        return self._make(*args, **options)

    def __exit__(self, *_):
        plan.make = self._make


def stepped(model, factor: float = 1.0, **options) -> int:
    """One step of a training loop; returns how many plans it made."""
    model.zero_grad()
    (loss_of(model, dist.get_rank()) * factor).backward()
    whole = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    with Planning() as planning, count_collectives() as calls:
        total = clip_grad_norm_(model.parameters(), 1e-3, **options)
    assert_one_all_reduce(calls)
    assert_norm(total, exact_norm(whole))
    clipped = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    assert_norm(torch.tensor(exact_norm(clipped)), 1e-3, 1e-4)
    return planning.plans


def fully_sharded(*sizes):
    return fully_shard(mlp(), mesh=mesh_of(*sizes, names=("replicate", "shard")[-len(sizes) :]))


@on_ranks(4)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_nothing_is_planned_from_the_third_call_on(sizes):
    model = fully_sharded(*sizes)
    assert [stepped(model, 1.0 + k) for k in range(4)] == [1, 1, 0, 0]


@on_ranks(2)
def test_a_gradient_that_comes_or_goes_is_planned_for():
    model = fully_sharded(2)
    [stepped(model) for _ in range(3)]
    last = list(model.parameters())[-1]
    last.requires_grad_(False)
    assert [stepped(model) for _ in range(3)] == [1, 1, 0]
    last.requires_grad_(True)
    assert [stepped(model) for _ in range(3)] == [1, 1, 0]


@on_ranks(2)
def test_on_one_rank_alone_too():
    mesh = mesh_of(2)
    held = [parameter(sharded(torch.ones(6), mesh, [Replicate()])) for _ in range(2)]
    for _ in range(3):
        assert_norm(clip_grad_norm_(held, 1e9), 12**0.5)
    if dist.get_rank() == 1:
        held[1].grad = None
    raised_everywhere(lambda: clip_grad_norm_(held, 1e9), ReplicaMismatchError, "not on rank")


@on_ranks(2)
def test_copies_stay_proved():
    mesh = mesh_of(2)
    held = parameter(sharded(torch.ones(6), mesh, [Replicate()]))
    for _ in range(3):
        clip_grad_norm_([held], 1e9)
    held.grad = sharded(torch.ones(6), mesh, [Replicate()])
    held.grad.to_local().mul_(1.0 + dist.get_rank())
    raised_everywhere(lambda: clip_grad_norm_([held], 1e9), ReplicaMismatchError, "parameters")


@on_ranks(2)
def test_what_is_planned_by_another_norm_or_group_is_another_plan():
    model = fully_sharded(2)
    assert [stepped(model) for _ in range(3)] == [1, 1, 0]
    with Planning() as planning:
        clip_grad_norm_(model.parameters(), 1e9, float("inf"))
        clip_grad_norm_(model.parameters(), 1e9)
    assert planning.plans == 1


def test_parameters_are_not_kept_alive():
    held = torch.nn.Parameter(torch.ones(5))
    for _ in range(3):
        held.grad = torch.ones(5)
        clip_grad_norm_([held], 1.0)
    gone, gradient = weakref.ref(held), weakref.ref(held.grad)
    gc.disable()
    try:
        del held
        assert gone() is None
        assert gradient() is None
    finally:
        gc.enable()


def test_few_sets_are_kept():
    for _ in range(3 * kept_plans._MOST):
        held = torch.nn.Parameter(torch.ones(5))
        held.grad = torch.ones(5)
        clip_grad_norm_([held], 1.0)
    assert len(kept_plans._kept) <= kept_plans._MOST


def test_another_parameter_at_the_same_address_is_another():
    """As the allocator hands an object's memory out again."""
    for k in range(40):
        held = torch.nn.Parameter(torch.ones(5 + k % 2))
        held.grad = torch.ones(5 + k % 2)
        for _ in range(1 + k % 4):
            assert float(clip_grad_norm_([held], 1e9)) == pytest.approx((5 + k % 2) ** 0.5)
        del held


def test_a_list_with_another_parameter_is_planned_for():
    held = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for one in held:
        one.grad = torch.ones(2)
    with Planning() as planning:
        for _ in range(3):
            clip_grad_norm_(held[:2], 1e9)
        clip_grad_norm_([held[0], held[2]], 1e9)
    assert planning.plans == 3


def test_names_are_the_calls_own():
    held = torch.nn.Parameter(torch.ones(2))
    held.grad = torch.ones(2)
    for _ in range(3):
        clip_grad_norm_([("a", held)], 1e9)
    held.grad = torch.full((2,), float("nan"))
    with pytest.raises(RuntimeError, match=r"\bb\b"):
        clip_grad_norm_([("b", held)], 1e9, error_if_nonfinite=True)
