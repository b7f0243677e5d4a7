"""overlap=True, and everything that changes a gradient between its hook and the clipping call.

Most of it moves no version counter. Each change must be seen: norm and clipped gradients are those
of the gradients as they are.
"""

import ctypes
import functools
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardclip import SELF, GradClipper
from shardclip.step import overlap
from tests.ranks import on_ranks
from tests.ranks.tensors import assert_same_values, coefficient, exact_norm, local_of, mesh_of

SIZE = 16


def grads(held) -> list:
    return [one.grad for one in held]


def locals_(held) -> list:
    return [local_of(one.grad) for one in held]


def like(held, value: float = 0.5) -> list:
    return [torch.full_like(one.grad, value) for one in held]


def unscale(held):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(held))


def fused(held):
    """Unscales the gradients in its own kernel, and writes them back."""
    mine = locals_(held)
    weights = [torch.zeros_like(one) for one in mine]
    settings = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    settings |= {"nesterov": False, "maximize": False, "is_first_step": True}
    scale, found = torch.tensor(8.0), torch.zeros(())
    torch._fused_sgd_(weights, mine, [], **settings, grad_scale=scale, found_inf=found)


def asynchronously(held):
    works = [dist.all_reduce(one, async_op=True) for one in locals_(held)]
    for work in works:
        work.wait()


def coalesced(held):
    with dist._coalescing_manager():
        for one in locals_(held):
            dist.all_reduce(one)


def gather_into(held):
    one = locals_(held)[0].view(-1)
    into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.13
    into(one, one[: one.numel() // dist.get_world_size()].clone())


def reduce_scatter_into(held):
    one = locals_(held)[0].view(-1)
    into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    into(one, torch.ones(one.numel() * dist.get_world_size()))


def scatter_into(held):
    one = locals_(held)[0]
    given = [torch.full_like(one, 2.0) for _ in range(dist.get_world_size())]
    dist.scatter(one, given if dist.get_rank() == 0 else None)


def exchange(held):
    one = locals_(held)[0].view(-1)
    dist.all_to_all_single(one, torch.arange(one.numel(), dtype=one.dtype))


def memory(held):
    for one in locals_(held):
        ctypes.memset(one.data_ptr(), 0, one.nbytes // 2)


def memory_of_storage(held):
    for one in locals_(held):
        address = one.untyped_storage().data_ptr() + one.storage_offset() * one.itemsize
        ctypes.memset(address, 0, one.nbytes // 2)


def other_local(held):
    for one in held:
        if hasattr(one.grad, "_local_tensor"):
            one.grad._local_tensor = one.grad._local_tensor * 3
        else:
            one.grad = one.grad * 3


def other_data(held):
    for one in locals_(held):
        one.data = one.data * 3


def other_storage(held):
    for one in locals_(held):
        one.set_((one * 3).untyped_storage(), 0, one.shape, one.stride())


def other_place(held):
    """The same tensor, now beginning elsewhere in the same memory."""
    for one in locals_(held):
        wide = torch.arange(2.0 * one.numel())
        one.data = wide[: one.numel()].view(one.shape)
        one.data = wide[one.numel() :].view(one.shape)


def halves_swapped(held):
    for one in locals_(held):
        half = one.view(-1).view(2, -1)
        half.copy_(half.flip(0) * torch.tensor([[1.0], [3.0]]))


def row_in_a_thousand(held):
    torch._foreach_mul_([one.view(-1)[-1:] for one in locals_(held)], 1000.0)


def largest_only(held):
    nn.utils.clip_grad_value_(held, float(max(one.abs().max() for one in locals_(held))) / 2)


def not_finite_repaired(held):
    for one in locals_(held):
        one.view(-1)[0] = torch.nan
        one.nan_to_num_(5.0)


def in_inference_mode(held):
    with torch.inference_mode():
        torch._foreach_mul_(locals_(held), 3.0)


def compiled(held):
    double = torch.compile(lambda one: one.mul_(3), backend="aot_eager")
    for one in locals_(held):
        double(one)


@functools.cache
def custom_operator():
    @torch.library.custom_op("shardclip_tests::triple_", mutates_args={"one"})
    def triple_(one: torch.Tensor) -> None:
        one.numpy()[:] *= 3

    return triple_


def a_custom_operator(held):
    each(custom_operator())(held)


def kept_view(held):
    views = [one.detach().view(-1)[::2] for one in locals_(held)]
    torch._foreach_add_(views, 1.0)


def numpy_written(held):
    for one in locals_(held):
        np.multiply(one.numpy(), 3, out=one.numpy())


def clip_with_torch(held):
    nn.utils.clip_grad_norm_(held, 1e-3)


def clip_each_with_torch(held):
    for one in held:
        nn.utils.clip_grads_with_norm_([one], 1e-3, torch.ones(()))


def each(change):
    def changed(held):
        for one in locals_(held):
            change(one)

    return changed


def rows(change):
    """As a table of four columns, through ``.data``."""
    return each(lambda one: change(one.data.view(-1, 4)))


CHANGES = {
    "foreach mul": lambda held: torch._foreach_mul_(grads(held), 3.0),
    "foreach mul, local": lambda held: torch._foreach_mul_(locals_(held), 3.0),
    "foreach mul by a tensor": lambda h: torch._foreach_mul_(locals_(h), torch.tensor(3.0)),
    "foreach mul by a list": lambda held: torch._foreach_mul_(locals_(held), [3.0] * len(held)),
    "foreach div": lambda held: torch._foreach_div_(grads(held), 3.0),
    "foreach add": lambda held: torch._foreach_add_(grads(held), like(held)),
    "foreach sub": lambda held: torch._foreach_sub_(grads(held), like(held)),
    "foreach clamp": lambda held: torch._foreach_clamp_max_(grads(held), 1e-3),
    "foreach zero": lambda held: torch._foreach_zero_(grads(held)),
    "foreach copy": lambda held: torch._foreach_copy_(
        locals_(held), [one * 3 for one in locals_(held)]
    ),
    "foreach lerp": lambda held: torch._foreach_lerp_(grads(held), like(held), 0.5),
    "foreach addcmul": lambda held: torch._foreach_addcmul_(grads(held), like(held), like(held)),
    "foreach neg": lambda held: torch._foreach_neg_(grads(held)),
    "foreach on a view": kept_view,
    "one row of many": row_in_a_thousand,
    "unscale_": unscale,
    "a fused optimizer": fused,
    "torch's clip_grad_norm_": clip_with_torch,
    "torch's clip_grads_with_norm_": clip_each_with_torch,
    "torch's clip_grad_value_": largest_only,
    "all_reduce": lambda held: [dist.all_reduce(one) for one in locals_(held)],
    "all_reduce, asynchronous": asynchronously,
    "all_reduce, coalesced": coalesced,
    "broadcast": lambda held: [dist.broadcast(one, 0) for one in locals_(held)],
    "all_gather": gather_into,
    "reduce_scatter": reduce_scatter_into,
    "scatter": scatter_into,
    "all_to_all": exchange,
    ".data": each(lambda one: one.data.mul_(3)),
    "detach()": each(lambda one: one.detach().mul_(3)),
    "_local_tensor": each(lambda one: one.mul_(3)),
    "one element": each(lambda one: one.view(-1)[7:8].fill_(5.0)),
    "setitem": rows(lambda table: table.__setitem__((0, 1), 5.0)),
    "masked_fill_": each(lambda one: one.data.masked_fill_(one > 0, 0.0)),
    "index_fill_": rows(lambda table: table.index_fill_(0, torch.tensor([1]), 3.0)),
    "index_add_": rows(lambda table: table.index_add_(0, torch.tensor([1]), torch.ones(1, 4))),
    "scatter_": rows(lambda table: table.scatter_(0, torch.tensor([[1]]), 3.0)),
    "out=": each(lambda one: torch.mul(one.data, 3, out=one.data)),
    "addmm_": rows(lambda table: table.addmm_(torch.ones(len(table), 2), torch.ones(2, 4))),
    "random": each(lambda one: one.data.normal_()),
    "halves swapped": halves_swapped,
    "nan_to_num_": not_finite_repaired,
    "NumPy": numpy_written,
    "DLPack": each(lambda one: torch.from_dlpack(one).mul_(3)),
    "memory": memory,
    "memory of the storage": memory_of_storage,
    "storage": each(lambda one: one.untyped_storage().fill_(0)),
    "inference mode": in_inference_mode,
    "compiled": compiled,
    "a custom operator": a_custom_operator,
    "another local tensor": other_local,
    "another .data": other_data,
    "set_()": other_storage,
    "another place": other_place,
}


@pytest.fixture(autouse=True, scope="module")
def _named_once():
    assert len(CHANGES) >= 30


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
    if kind == "fsdp2":
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh_of(2))
        fully_shard(model, mesh=mesh_of(2))
    return model


def backward(model: nn.Module, step: int = 0, **options) -> None:
    torch.manual_seed(10 * step + dist.get_rank())
    loss = model(torch.randn(4, SIZE)).square().sum() * 3
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        loss.backward(**options)


class Training:
    """A model and its clipper, after the first step, from which on hooks sum every gradient."""

    def __init__(self, kind: str, prepare=lambda held: None, **options):
        self.kind = kind
        self.model = build(kind)
        self.held = list(self.model.parameters())
        self.group = SELF if kind == "plain" else None
        prepare(self.held)
        self.clipper = GradClipper(self.model, 1e9, overlap=True, group=self.group, **options)
        small, overlap.SMALL = overlap.SMALL, 1
        try:
            backward(self.model)
            self.clip_and_compare()
        finally:
            overlap.SMALL = small
        self.model.zero_grad()

    def early(self) -> int:
        return len(self.clipper._collector.overlap.early)

    def clip_and_compare(self, unit: float = 1.0, **options) -> None:
        """Clip to half the float64 norm of the gradients as they are; compare every element."""
        whole = [g.full_tensor() if self.kind == "fsdp2" else g for g in grads(self.held)]
        expected = exact_norm(whole) * unit
        before = [one.clone() for one in locals_(self.held)]
        self.clipper.max_norm = expected / 2
        result = self.clipper.clip_(**options)
        assert float(result.total_norm) == pytest.approx(expected, rel=1e-6)
        factor = coefficient(expected, expected / 2) * unit
        for was, now in zip(before, locals_(self.held), strict=True):
            assert_same_values(now, was * factor)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_every_change_after_the_hooks_is_seen(kind, change):
    training = Training(kind)
    for step in (1, 2):
        training.model.zero_grad()
        backward(training.model, step)
        assert training.early() == len(training.held)
        with torch.no_grad():
            CHANGES[change](training.held)
        training.clip_and_compare()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
def test_what_only_reads_leaves_the_sums(kind):
    training = Training(kind)
    backward(training.model, 1)
    places = [one.untyped_storage()._cdata for one in locals_(training.held)]
    nn.utils.get_total_norm(grads(training.held))
    for one in locals_(training.held):
        assert bool(torch.isfinite(one).all())
        assert repr(one)
        one.clone(), one.double(), one.abs().max(), one.tolist()
    hooks = training.clipper._collector.overlap
    hooks.drop_outdated(grads(training.held))
    assert training.early() == len(training.held)
    assert places == [one.untyped_storage()._cdata for one in locals_(training.held)]
    assert not any(torch._C._is_cow_tensor(one) for one in locals_(training.held))  # as they were
    training.clip_and_compare()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
def test_memory_stays_where_it_is(kind):
    """Whoever holds an address (a NumPy array, a captured graph) still sees the gradient."""
    training = Training(kind)
    backward(training.model, 1)
    places = [
        torch._C._data_address(one) + one.storage_offset() * 4 for one in locals_(training.held)
    ]
    training.clip_and_compare()
    torch._foreach_mul_(grads(training.held), 2.0)
    assert places == [one.data_ptr() for one in locals_(training.held)]


@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@pytest.mark.parametrize("called", ["by the user", "by clip_"])
def test_a_scaler(kind, called):
    """The whole kind of loop that fp16 training has, scale 65536."""
    training = Training(kind)
    optimizer = torch.optim.SGD(training.held, 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        loss = training.model(torch.randn(4, SIZE)).square().sum()
        scaler.scale(loss).backward()
        assert training.early() == len(training.held)
        if called == "by the user":
            scaler.unscale_(optimizer)
            training.clip_and_compare()
        else:
            training.clip_and_compare(1 / 65536, grad_scaler=scaler, optimizers=[optimizer])
        scaler.step(optimizer)
        scaler.update()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("begins", [False, True])
def test_hooks_of_others(kind, first, begins):
    """They may change a gradient after our hook, or begin before it what ends only later."""
    works = []
    begun = []

    def hook(one):
        if begins and begun:
            works.append(dist.all_reduce(local_of(one.grad), async_op=True))
        elif not begins:
            torch._foreach_mul_([one.grad], 3.0)

    def hang(held):
        for one in held:
            one.register_post_accumulate_grad_hook(hook)

    training = Training(kind, hang if first else lambda held: None)
    if not first:
        hang(training.held)
    begun.append(True)
    for step in (1, 2):
        for _ in range(2):  # the second accumulates
            backward(training.model, step)
            for work in works:
                work.wait()
            works.clear()
        training.clip_and_compare()
        training.model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@pytest.mark.parametrize("between", [None, "foreach mul", "unscale_", "another .data"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_accumulation_with_changes_between(kind, between, create_graph):
    if kind == "fsdp2" and create_graph:
        return  # FSDP2 has no double backward
    training = Training(kind)
    for step in (1, 2):
        backward(training.model, step, create_graph=create_graph)
        if between is not None:
            with torch.no_grad():
                CHANGES[between](training.held)
        backward(training.model, step + 5)
        for one in training.held:
            one.grad = one.grad.detach() if create_graph else one.grad
        training.clip_and_compare()
        training.model.zero_grad(set_to_none=step == 2)


@on_ranks(2)
def test_accumulation_into_a_part_of_a_unit_with_a_change_between():
    """What was summed is in the same memory as what is accumulated afterwards."""
    training = Training("fsdp2")
    first, second = training.held[0], training.held[1]
    backward(training.model, 1)
    with torch.no_grad():
        torch._foreach_mul_([first.grad], 3.0)
        local_of(second.grad).add_(1)  # as the second micro-batch does
        for hook in second._post_accumulate_grad_hooks.values():
            hook(second)
    training.clip_and_compare()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
def test_two_clippers_hide_nothing_from_each_other(kind):
    training = Training(kind)
    other = GradClipper(training.model, None, overlap=True, group=training.group)
    small, overlap.SMALL = overlap.SMALL, 1
    try:
        backward(training.model)
        other.clip_()
    finally:
        overlap.SMALL = small
    training.model.zero_grad()
    backward(training.model, 1)
    assert training.early() == len(training.held) == len(other._collector.overlap.early)
    with torch.no_grad():
        torch._foreach_mul_(grads(training.held), 3.0)
    for one in training.held:  # the second clipper alone looks again
        other._collector.overlap.observe(one)
    training.clip_and_compare()
