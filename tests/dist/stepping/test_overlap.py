"""overlap=True: sums taken by hooks during the backward pass, and only while they are true."""

import gc
import warnings
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shardclip import GradClipper, compat
from shardclip.comm import reduce
from shardclip.comm.world import World
from shardclip.layout.sources import Source
from shardclip.step import overlap
from tests.kernels.accelerator import accelerator
from tests.ranks import count_collectives, on_ranks
from tests.ranks.models import loss_of, mlp
from tests.ranks.tensors import exact_norm, local_of, mesh_of
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce
from tests.ranks.warned import recorded


class _Read(TorchDispatchMode):
    """Counts the float32 elements that norms read, and packing for them: into scratch memory.

    The proof of copies joins its samples, too, but in new memory.
    """

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "linalg_vector_norm" or (name == "cat" and "out" in (kwargs or {})):
            held = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.elements += sum(t.numel() for t in held if t.dtype == torch.float32)
        return func(*args, **(kwargs or {}))


@contextmanager
def every_size_hooked():
    small, overlap.SMALL = overlap.SMALL, 1
    try:
        yield
    finally:
        overlap.SMALL = small


def sharded_model(*sizes) -> nn.Module:
    model = mlp()
    mesh = mesh_of(*sizes, names=("replicate", "shard")[-len(sizes) :])
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def backward(model, factor: float = 1.0) -> None:
    (loss_of(model, dist.get_rank()) * factor).backward()


def exact(model, norm_type=2.0) -> float:
    return exact_norm([p.grad.full_tensor() for p in model.parameters() if p.grad is not None])


def counted(clipper) -> tuple[torch.Tensor, int]:
    """One step: its norm, and how much of the gradients it read."""
    with count_collectives() as calls, _Read() as read:
        total = clipper.clip_().total_norm
    assert_one_all_reduce(calls)
    return total, read.elements


def followed(model, **options) -> GradClipper:
    """A clipper after its first step, from which on the hooks know what to read."""
    clipper = GradClipper(model, 1e9, overlap=True, **options)
    backward(model)
    assert_norm(clipper.clip_().total_norm, exact(model))
    model.zero_grad()
    return clipper


@on_ranks(4)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_nothing_is_left_to_read(sizes):
    with every_size_hooked():
        model = sharded_model(*sizes)
        clipper = followed(model)
        for factor in (1.0, 3.0):
            backward(model, factor)
            total, read = counted(clipper)
            assert_norm(total, exact(model))
            assert read == 0
            model.zero_grad()


@on_ranks(2)
def test_small_gradients_are_left_to_the_step():
    model = sharded_model(2)
    clipper = followed(model)
    backward(model)
    assert not clipper._collector.overlap.early
    total, read = counted(clipper)
    assert_norm(total, exact(model))
    assert read > 0


@on_ranks(2)
def test_accumulation_counts_the_last_value():
    with every_size_hooked():
        model = sharded_model(2)
        clipper = followed(model)
        backward(model)
        backward(model, 5.0)
        total, read = counted(clipper)
        assert_norm(total, exact(model))
        assert read == 0


@on_ranks(2)
def test_without_sync_only_the_last_micro_batch_has_gradients():
    with every_size_hooked():
        model = sharded_model(2)
        clipper = followed(model)
        model.set_requires_gradient_sync(False)
        backward(model)
        model.set_requires_gradient_sync(True)
        backward(model)
        total, read = counted(clipper)
        assert_norm(total, exact(model))
        assert read == 0


def scale(parameter):
    parameter.grad *= 3


def scale_local(parameter):
    local_of(parameter.grad).mul_(3)


def exchange(parameter):
    parameter.grad = parameter.grad.detach() * 3


def forget(parameter):
    parameter.grad = None


@on_ranks(2)
@pytest.mark.parametrize("change", [scale, scale_local, exchange, forget])
def test_what_is_changed_after_the_backward_is_summed_again(change):
    with every_size_hooked():
        model = sharded_model(2)
        clipper = followed(model)
        backward(model)
        change(next(model.parameters()))
        total, _ = counted(clipper)
        assert_norm(total, exact(model))


@on_ranks(2)
def test_memory_that_was_given_away_is_not_taken_for_the_same_gradient():
    with every_size_hooked():
        model = sharded_model(2)
        clipper = followed(model)
        backward(model)
        for parameter in model.parameters():
            shape = local_of(parameter.grad).shape
            spec = parameter.grad._spec
            parameter.grad = None
            parameter.grad = type(parameter.data)(torch.full(shape, 2.0), spec, requires_grad=False)
        total, _ = counted(clipper)
        assert_norm(total, exact(model))


@on_ranks(2)
def test_a_parameter_without_a_gradient_in_a_step():
    with every_size_hooked():
        model = sharded_model(2)
        clipper = followed(model)
        backward(model)
        last = list(model.parameters())[-1]
        last.grad = None
        assert_norm(counted(clipper)[0], exact(model))
        model.zero_grad()
        backward(model)
        assert_norm(counted(clipper)[0], exact(model))


@on_ranks(2)
def test_after_the_hooks_are_removed():
    with every_size_hooked():
        model = sharded_model(2)
        clipper = followed(model)
        for parameter in model.parameters():
            parameter._post_accumulate_grad_hooks.clear()
        backward(model)
        total, read = counted(clipper)
        assert_norm(total, exact(model))
        assert read > 0


@on_ranks(2)
def test_the_hooks_go_with_their_clipper():
    model = sharded_model(2)
    clipper = GradClipper(model, 1.0, overlap=True)
    first = next(model.parameters())
    assert len(first._post_accumulate_grad_hooks) == 1
    del clipper
    gc.collect()
    assert not first._post_accumulate_grad_hooks


@on_ranks(2)
def test_a_step_that_failed_leaves_nothing_behind():
    with every_size_hooked():
        model = sharded_model(2)
        clipper = followed(model, also=("tokens",))
        backward(model)
        with pytest.raises(ValueError, match="not declared"):
            clipper.clip_(also={"unknown": 1.0})
        backward(model)
        assert_norm(counted(clipper)[0], exact(model))


@on_ranks(2)
def test_other_norms():
    with every_size_hooked():
        model = sharded_model(2)
        for p in (0.0, 1.0, float("inf")):
            clipper = GradClipper(model, 1e9, p, overlap=True)
            for _ in range(2):
                model.zero_grad()
                backward(model)
                full = [one.grad.full_tensor() for one in model.parameters()]
                assert_norm(clipper.clip_().total_norm, exact_norm(full, p))


@on_ranks(2)
def test_under_ddp_it_stays_off_and_says_so():
    """There the hook sees the gradient before it is averaged."""
    with every_size_hooked():
        model = DistributedDataParallel(mlp())
        with recorded() as warned:
            clipper = GradClipper(model, 1e9, overlap=True)
        assert any("DistributedDataParallel" in one for one in warned)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, dist.get_rank()).backward()
            expected = exact_norm([one.grad for one in model.parameters()])
            assert_norm(clipper.clip_().total_norm, expected)


@on_ranks(2)
@pytest.mark.parametrize("where", ["group", "mesh"])
def test_under_cpu_offload_it_stays_off_and_says_so(where):
    """The hook may run while the gradient is still on its way to the host (torch 2.8 to 2.11).

    A group or a mesh on another device than the parameters stands for an accelerator's.
    """
    elsewhere = torch.device("cpu") if where == "mesh" else torch.device("cuda")
    with every_size_hooked(), pytest.MonkeyPatch.context() as patch:
        model = sharded_model(2)
        sources = [Source(name, one) for name, one in model.named_parameters()]
        world = replace(reduce.resolve(None), device=elsewhere)
        if where == "mesh":
            mesh = SimpleNamespace(device_type="cuda")
            patch.setattr(compat, "mesh_and_placements", lambda tensor: (mesh, ()))
        hooks = overlap.Overlap(sources, 2.0, world)
        assert hooks.notices == [overlap.ON_OFFLOAD]
        assert not any(one._post_accumulate_grad_hooks for one in model.parameters())


def test_sparse_gradients_are_left_to_the_step():
    with every_size_hooked():
        model = nn.Embedding(50, 4, sparse=True)
        clipper = GradClipper(model, 1e9, overlap=True)
        for _ in range(2):
            model.zero_grad()
            for _ in range(2):  # accumulates
                model(torch.tensor([3, 3, 7])).square().sum().backward()
            expected = exact_norm([model.weight.grad.to_dense()])
            assert float(clipper.clip_().total_norm) == pytest.approx(expected, rel=1e-6)


def test_on_an_accelerator_it_stays_off_and_says_so():
    with accelerator() as device:
        held = [nn.Parameter(torch.zeros(8, device=device))]
        hooks = overlap.Overlap([Source("weight", held[0])], 2.0, World((0,), 0))
    (notice,) = hooks.notices
    assert "on cuda" in notice
    assert "unscale_" in notice
    assert not held[0]._post_accumulate_grad_hooks


def test_one_process_alone_hooks_plain_gradients():
    with every_size_hooked(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mlp()
        clipper = GradClipper(model, 1e9, overlap=True)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, 0).backward()
            expected = exact_norm([one.grad for one in model.parameters()])
            with _Read() as read:
                total = clipper.clip_().total_norm
            assert abs(float(total) - expected) <= 1e-6 * expected
        assert read.elements == 0


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_neighbours_accumulation_is_a_change_like_any_other(accumulated):
    """They lie in one memory: who wrote to it, and where, nobody can tell."""
    with every_size_hooked():
        held = [nn.Parameter(torch.zeros(8)) for _ in range(2)]
        clipper = GradClipper(held, 1e9, overlap=True)
        hooks = clipper._collector.overlap

        def give(flat):
            for parameter, part in zip(held, flat.split(8), strict=True):
                parameter.grad = part

        give(torch.ones(16))
        clipper.clip_()
        give(torch.ones(16))
        for parameter in held:
            hooks.observe(parameter)
        for parameter in held[-accumulated:]:
            parameter.grad.add_(1)
            hooks.observe(parameter)
        hooks.drop_outdated([parameter.grad for parameter in held])
        assert sorted(hooks.early) == ([0, 1] if accumulated == 2 else [1])
        expected = exact_norm([parameter.grad for parameter in held])
        assert abs(float(clipper.clip_().total_norm) - expected) <= 1e-6 * expected


def test_another_place_in_the_same_memory_is_another_gradient():
    with every_size_hooked():
        held = nn.Parameter(torch.zeros(8))
        clipper = GradClipper([held], 1e9, overlap=True)
        for _ in range(2):
            flat = torch.arange(16.0)
            held.grad = flat[:8]
            clipper._collector.overlap.observe(held)
            held.grad.data = flat[8:]  # moves no version, and writes nothing
            assert float(clipper.clip_().total_norm) == pytest.approx(exact_norm([flat[8:]]))
