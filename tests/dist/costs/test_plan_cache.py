"""The functions plan no more for parameters that they see again, until something changes."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardclip import ReplicaMismatchError, clip_grad_norm_, get_total_norm
from shardclip.plan import cache, plan
from tests.ranks import count_collectives, on_ranks, raised_everywhere
from tests.ranks.models import loss_of, mlp
from tests.ranks.tensors import exact_norm, mesh_of, parameter, sharded
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce
from tests.ranks.warned import recorded


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


def forget() -> None:
    """Begin as in a new process: another test's model may be of the same kind."""
    vars(cache._threads).clear()


def fully_sharded(*sizes):
    forget()
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


@on_ranks(4)
def test_an_equal_slice_of_another_root_is_planned_for():
    """Along "pp" lie other parameters, along "replicate" copies; both slices are ``("dp",)``."""
    for axis, norm in (("pp", 32**0.5), ("replicate", 4.0)):
        mesh = mesh_of(2, 2, names=(axis, "dp"))["dp"]
        held = torch.nn.Parameter(DTensor.from_local(torch.ones(8), mesh, [Shard(0)]))
        for _ in range(3):
            held.grad = DTensor.from_local(torch.ones(8), mesh, [Shard(0)])
            assert_norm(clip_grad_norm_([held], 1e9), norm)


@on_ranks(2)
def test_models_can_still_be_converted():
    """``Module.to`` swaps DTensors, which torch refuses for tensors with weak references."""
    model = fully_sharded(2)
    [stepped(model) for _ in range(3)]
    model.zero_grad()
    model.to(torch.float64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


@on_ranks(2)
def test_a_gradient_that_shares_memory_later_is_refused_on_all_ranks():
    held = torch.nn.Parameter(torch.ones(4))
    for _ in range(3):
        held.grad = torch.ones(4)
        clip_grad_norm_([held], 1e9)
    held.grad = torch.ones(1).expand(4) if dist.get_rank() else torch.ones(4)
    raised_everywhere(lambda: clip_grad_norm_([held], 1e9), ValueError, "share memory")


@on_ranks(2)
def test_what_is_no_tensor_later_is_refused_on_all_ranks():
    held = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    for _ in range(3):
        for one in held:
            one.grad = torch.ones(4)
        clip_grad_norm_(held, 1e9)
    if dist.get_rank():
        held[1] = held[1].detach().numpy()  # to compare it gives an array
    raised_everywhere(lambda: clip_grad_norm_(held, 1e9), TypeError, "rank 1")


@on_ranks(2)
def test_what_has_no_shape_is_refused_on_all_ranks():
    held = torch.nn.Parameter(torch.ones(4))
    if dist.get_rank():
        with recorded():
            held = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    raised_everywhere(lambda: get_total_norm([held]), ValueError, "rank 1")


def test_gradients_are_not_kept_alive():
    held = torch.nn.Parameter(torch.ones(5))
    for _ in range(3):
        held.grad = torch.ones(5)
        clip_grad_norm_([held], 1.0)
    gradient = weakref.ref(held.grad)
    gc.disable()
    try:
        del held
        assert gradient() is None
    finally:
        gc.enable()


def test_few_sets_are_kept():
    for size in range(3 * cache._MOST):
        held = torch.nn.Parameter(torch.ones(5))
        held.grad = torch.ones(5)
        for _ in range(3):
            clip_grad_norm_([(f"w{size}", held)], 1.0)
    assert len(cache._threads.kept) <= cache._MOST


def test_a_threads_plans_are_its_own():
    def loop(number: int) -> None:
        for step in range(50):
            held = [torch.nn.Parameter(torch.ones(3)) for _ in range(1 + (number + step) % 6)]
            for one in held:
                one.grad = torch.ones(3)
            norms.append(float(clip_grad_norm_(held, 1e9)) ** 2 / len(held))

    norms: list[float] = []
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(loop, range(8)))
    assert norms == [pytest.approx(3.0)] * 400


def test_names_are_the_calls_own():
    held = torch.nn.Parameter(torch.ones(2))
    held.grad = torch.ones(2)
    for _ in range(3):
        clip_grad_norm_([("a", held)], 1e9)
    held.grad = torch.full((2,), float("nan"))
    with pytest.raises(RuntimeError, match=r"\bb\b"):
        clip_grad_norm_([("b", held)], 1e9, error_if_nonfinite=True)
