"""Uneven inputs: inside torch's ``join()`` some ranks make no call any more."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardclip import (
    SELF,
    AdaptiveGradClipper,
    GradClipper,
    NonFiniteGradientError,
    PerTensorClipper,
    ReplicaMismatchError,
    clip_by_global_norm,
    clip_grad_norm_,
    clip_grads_with_norm_,
    get_total_norm,
    global_norm,
)
from shardclip.layout.adapters import zero_redundancy
from tests.dist.costs.test_unread_lanes import as_on_a_device
from tests.ranks import count_collectives, on_ranks, raised_everywhere
from tests.ranks.models import mlp
from tests.ranks.tensors import exact_norm
from tests.ranks.uneven import assert_clipped, averaged, backward, loss_of, steps, train
from tests.ranks.unsharded import CLIPS, assert_one_all_reduce

with warnings.catch_warnings():  # importing it, torch warns of its own use of torch.jit
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer


def descent(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def gradients_of(model):
    return [one.grad for one in model.parameters()]


def by_function(model):
    return lambda max_norm: clip_grad_norm_(model.parameters(), max_norm)


def by_norm(measure):
    def make(model):
        def clip(max_norm):
            norm = measure(gradients_of(model))
            clip_grads_with_norm_(model.parameters(), max_norm, norm)
            return norm

        return clip

    return make


def out_of_place(model):
    def clip(max_norm):
        clipped, norm = clip_by_global_norm(gradients_of(model), max_norm)
        for one, grad in zip(model.parameters(), clipped, strict=True):
            one.grad.copy_(grad)
        return norm

    return clip


def by_clipper(call=GradClipper.clip_, **options):
    def make(model):
        clipper = GradClipper(model, 1.0, **options)

        def clip(max_norm):
            clipper.max_norm = max_norm
            return call(clipper).total_norm

        return clip

    return make


def hooked(model):
    with pytest.warns(UserWarning, match="overlap=True takes"):
        return by_clipper(overlap=True)(model)


def sharing_the_reading(model):
    return by_clipper(layout=zero_redundancy.layout(model))(model)


WAYS = {
    "a generator": by_function,
    "a module": lambda model: lambda max_norm: clip_grad_norm_(model, max_norm),
    "get_total_norm": by_norm(get_total_norm),
    "exact norm": by_norm(lambda grads: get_total_norm(grads, exact=True)),
    "global_norm": by_norm(global_norm),
    "clip_by_global_norm": out_of_place,
    "clip_": by_clipper(),
    "start, finish": by_clipper(lambda clipper: clipper.start().finish()),
    "skip": by_clipper(nonfinite="skip"),
    "raise": by_clipper(nonfinite="raise"),
    "norms": by_clipper(norms="parameter"),
    "exact": by_clipper(exact=True),
    "overlap": hooked,
    "layout": sharing_the_reading,
}
BOTH = pytest.mark.parametrize("way", ["a generator", "clip_"])


@pytest.mark.parametrize("way", WAYS)
@on_ranks(3)
def test_each_active_rank_clips_by_the_norm_of_what_ddp_has_averaged(way):
    model = DistributedDataParallel(mlp())
    train(model, WAYS[way](model), descent(model))


@on_ranks(2)
def test_two_ranks():
    model = DistributedDataParallel(mlp())
    train(model, by_function(model), descent(model))


@on_ranks(3)
def test_a_step_clips_and_steps():
    model = DistributedDataParallel(mlp())
    optimizer = descent(model)
    train(model, by_clipper(lambda clipper: clipper.step(optimizer))(model))


class _Parts(nn.Module):
    """A layer that is frozen, and one that is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.frozen, self.unused, self.used = (nn.Linear(3, 3) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, batch):
        return self.used(self.frozen(batch))


KINDS = {
    "bucket views": lambda: DistributedDataParallel(mlp(), gradient_as_bucket_view=True),
    "unused and frozen": lambda: DistributedDataParallel(_Parts(), find_unused_parameters=True),
}


@BOTH
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(3)
def test_kinds_of_ddp(way, kind):
    model = KINDS[kind]()
    train(model, WAYS[way](model), descent(model))


@BOTH
@on_ranks(3)
def test_an_average_over_the_active_ranks(way):
    model = DistributedDataParallel(mlp())
    join = model.join(divide_by_initial_world_size=False)
    train(model, WAYS[way](model), descent(model), join, among="active")


@BOTH
@on_ranks(3)
def test_an_optimizer_that_joins_too(way):
    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    train(model, WAYS[way](model), optimizer, Join([model, optimizer]))


@BOTH
@on_ranks(3)
def test_accumulation(way):
    model = DistributedDataParallel(mlp())
    clip = WAYS[way](model)
    with model.join():
        for step in steps():
            full = [2 * grad for grad in averaged(model.module, step)]
            model.zero_grad()
            with model.no_sync():
                loss_of(model, dist.get_rank(), step).backward()
            loss_of(model, dist.get_rank(), step).backward()
            max_norm = exact_norm(full) / 4
            with count_collectives() as calls:
                norm = clip(max_norm)
            assert calls == []
            assert_clipped(model.parameters(), full, norm, max_norm)


@pytest.mark.parametrize("both", [False, True])
@on_ranks(2)
def test_two_modules_join_and_one_or_both_are_clipped(both):
    models = [DistributedDataParallel(mlp()) for _ in range(2)]
    for one in models[1].parameters():
        one.data.mul_(2)
    clipped = nn.ModuleList(models if both else models[:1])
    clipper = GradClipper(clipped, 1e-3)
    with Join(models):
        for step in steps():
            for model in models:
                backward(model, step)
            full = [grad for model in models for grad in averaged(model.module, step)]
            full = full[: len(list(clipped.parameters()))]
            with count_collectives() as calls:
                measured = clip_grad_norm_(clipped.parameters(), float("inf"))
                norm = clipper.clip_().total_norm
            assert calls == []
            assert float(measured) == pytest.approx(exact_norm(full), rel=1e-5)
            assert_clipped(clipped.parameters(), full, norm, 1e-3)


@pytest.mark.parametrize("kind", [PerTensorClipper, AdaptiveGradClipper])
@on_ranks(3)
def test_clippers_by_tensor_and_by_unit(kind):
    model = DistributedDataParallel(mlp())
    clipper = kind(model, 1e-3)
    twin = copy.deepcopy(model.module)
    alone = kind(twin, 1e-3, group=SELF)
    with model.join():
        for step in steps():
            backward(model, step)
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                other.grad = one.grad.clone()
            before = gradients_of(twin)[0].clone()
            with count_collectives() as calls:
                found = clipper.clip_()
            assert calls == []
            assert found == alone.clip_()
            assert not torch.equal(before, gradients_of(twin)[0])
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


@on_ranks(2)
def test_a_loss_scale():
    model = DistributedDataParallel(mlp())
    optimizer, scaler = descent(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    clipper = GradClipper(model, 1e-3)
    with model.join():
        for step in steps():
            full = averaged(model.module, step)
            model.zero_grad()
            scaler.scale(loss_of(model, dist.get_rank(), step)).backward()
            with count_collectives() as calls:
                result = clipper.clip_(grad_scaler=scaler, optimizers=[optimizer])
            assert calls == []
            assert_clipped(model.parameters(), full, result.total_norm, 1e-3)
            scaler.step(optimizer)
            scaler.update()


@on_ranks(2)
def test_a_step_that_is_skipped():
    model = DistributedDataParallel(mlp())
    clipper = GradClipper(model, 1.0, nonfinite="skip")
    with model.join():
        for step in steps():
            backward(model, step)
            model.module[0].bias.grad[1] = torch.nan
            with count_collectives() as calls:
                result = clipper.clip_()
            assert calls == []
            assert result.skipped
            assert list(result.nonfinite_parameters) == ["0.bias"]
            assert [found.first for found in result.nonfinite] == [(1,)]
            with pytest.raises(NonFiniteGradientError, match="non-finite"):
                clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert clipper.skipped == len(steps())


@pytest.mark.parametrize("clip", CLIPS)
@on_ranks(3)
def test_afterwards_all_take_part_again(clip):
    model = DistributedDataParallel(mlp())
    clipper = GradClipper(model, 1.0)
    train(model, by_clipper()(model), descent(model))
    backward(model, 0)
    CLIPS[clip](model, 1e9, 2.0)  # counts one all-reduce
    with count_collectives() as calls:
        clipper.clip_()
    assert_one_all_reduce(calls)
    with model.no_sync():
        backward(model, 0)
    raised_everywhere(lambda: CLIPS[clip](model, 1.0, 2.0), ReplicaMismatchError, r"0\.weight")
    raised_everywhere(clipper.clip_, ReplicaMismatchError, r"0\.weight")


@on_ranks(2)
def test_a_join_left_by_an_error_is_over():
    model = DistributedDataParallel(mlp())

    def fail():
        with model.join():
            backward(model, 0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    CLIPS["function"](model, 1.0, 2.0)


@on_ranks(2)
def test_a_join_that_is_switched_off():
    model = DistributedDataParallel(mlp())
    clipper = GradClipper(model, 1.0, also=("tokens",))
    with model.join(enable=False):
        backward(model, 0)
        CLIPS["function"](model, 1e9, 2.0)
        with count_collectives() as calls:
            result = clipper.clip_(also={"tokens": 3})
        assert_one_all_reduce(calls)
        assert result.sums == {"tokens": 6}


@on_ranks(2)
def test_an_early_end():
    model = DistributedDataParallel(mlp())
    taken = []

    def train_on():
        with model.join(throw_on_early_termination=True):
            for step in steps():
                backward(model, step)
                taken.append(clip_grad_norm_(model.parameters(), 1.0))

    with pytest.raises(RuntimeError, match="exhausted"):
        train_on()
    assert len(taken) == 1


@on_ranks(2)
def test_where_reading_the_lanes_costs_something():
    model = DistributedDataParallel(mlp())
    clipper = GradClipper(model, 1.0)
    with as_on_a_device():
        train(model, by_function(model), descent(model))
        train(model, by_clipper()(model), descent(model))
        backward(model, 0)
        clipper.clip_()
        with model.no_sync():
            backward(model, 0)
        assert clipper.clip_().total_norm.isnan()
        with model.join():
            for step in steps():
                backward(model, step)
                if step == 0:
                    with (
                        count_collectives() as calls,
                        pytest.raises(ReplicaMismatchError, match=r"before join\(\)"),
                    ):
                        clipper.clip_()
                    assert calls == []
                assert clipper.clip_().total_norm.isfinite()
        backward(model, 0)
        with count_collectives() as calls:
            clipper.clip_()
        assert_one_all_reduce(calls)
