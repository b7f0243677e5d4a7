"""Inside torch's ``join()``: what needs a rank that may have joined is refused by all, unsent."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardclip import (
    SELF,
    AdaptiveGradClipper,
    GradClipper,
    PerTensorClipper,
    adaptive_clip_grad_,
    clip_by_global_norm,
    clip_grad_norm_,
    clip_grad_per_tensor_norm_,
    clip_grad_value_,
    get_total_norm,
    global_norm,
)
from shardclip.rules import adaptive
from tests.ranks import count_collectives, everywhere, on_ranks
from tests.ranks.models import mlp
from tests.ranks.tensors import S0, R, exact_norm, mesh_of, parameter, sharded
from tests.ranks.uneven import backward, steps


@contextmanager
def refused(*patterns):
    """The block's call raises a ValueError and sends nothing."""
    with count_collectives() as calls, pytest.raises(ValueError) as caught:  # noqa: PT011
        yield
    assert calls == []
    for pattern in patterns:
        assert pattern in str(caught.value), (pattern, str(caught.value))


def train(model, *checks, join=None):
    """Make the checks in every step of this rank's; the ranks' steps are uneven."""
    with model.join() if join is None else join:
        for step in steps():
            backward(model, step)
            before = [one.grad.clone() for one in model.parameters() if one.grad is not None]
            for check in checks:
                check()
            after = [one.grad for one in model.parameters() if one.grad is not None]
            assert all(map(torch.equal, before, after))
    assert sum(everywhere(len(steps()))) > dist.get_world_size()  # and all have come to the end


def by_both(parameters, clipper, *patterns):
    """Checks that the function and the clipper refuse them."""

    def check():
        with refused(*patterns):
            clip_grad_norm_(parameters, 1.0)
        with refused(*patterns):
            clipper.clip_()
        with refused(*patterns):
            clipper.start()
        with refused(*patterns):
            clipper.step(torch.optim.SGD([one for _, one in parameters], lr=1.0))

    return check


def with_more(model, name, more):
    return [*((f"{n}", p) for n, p in model.module.named_parameters()), (name, more)]


@on_ranks(3)
def test_parameters_that_ddp_ignores():
    module = mlp()
    ignored = module[1][0].weight
    module._ddp_params_and_buffers_to_ignore = ["1.0.weight"]
    model = DistributedDataParallel(module)
    named = list(module.named_parameters())
    clipper = GradClipper(named, 1.0)
    check = by_both(named, clipper, "1.0.weight: not averaged by a Distr", "group=shardclip.SELF")
    others = [one for one in model.parameters() if one is not ignored]
    train(model, check, lambda: clip_grad_norm_(others, float("inf")))


@pytest.mark.parametrize("placements", [[S0], [R]])
@on_ranks(2)
def test_distributed_tensors(placements):
    model = DistributedDataParallel(mlp())
    more = parameter(sharded(torch.ones(4), mesh_of(2), placements))
    named = with_more(model, "head.weight", more)
    clipper = GradClipper(named, 1.0)
    train(model, by_both(named, clipper, "head.weight: not averaged"))


@on_ranks(2)
def test_parameters_of_no_module_that_joins():
    model, other = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    backward(other, 0)
    named = list(other.module.named_parameters())
    clipper = GradClipper(named, 1.0)
    train(model, by_both(named, clipper, "0.weight, 0.bias", ": not averaged by"))


@on_ranks(2)
def test_a_parameter_without_a_gradient():
    model = DistributedDataParallel(mlp())
    named = with_more(model, "extra", nn.Parameter(torch.ones(2)))
    clipper = GradClipper(named, 1.0)
    train(model, by_both(named, clipper, "extra: not averaged by"))
    named[-1][1].requires_grad_(False)  # such a one is in no norm
    clipper.max_norm = float("inf")
    train(
        model,
        lambda: clip_grad_norm_(named, float("inf")),
        clipper.clip_,
    )


@on_ranks(3)
def test_a_group_with_ranks_that_the_module_is_not_on():
    pair = dist.new_group([0, 1])
    rank = dist.get_rank()
    model = DistributedDataParallel(mlp(), process_group=pair) if rank < 2 else mlp()
    clippers = [GradClipper(model, float("inf"))]
    if rank == 2:
        return
    clippers.append(GradClipper(model, float("inf"), group=pair))

    def check():
        with refused("rank(s) 2 of the group are not in its module's process group", "group="):
            clip_grad_norm_(model, 1.0)
        with refused("rank(s) 2 of the group"):
            clippers[0].clip_()
        with count_collectives() as calls:
            norms = [clip_grad_norm_(model, float("inf"), group=pair), clippers[1].clip_()]
        assert calls == []
        assert float(norms[0]) == float(norms[1].total_norm)

    with model.join():
        for step in steps():
            backward(model, step)
            check()


@on_ranks(2)
def test_a_group_that_no_other_rank_of_the_join_is_in():
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = DistributedDataParallel(mlp())
    more = parameter(torch.ones(4))
    train(
        model,
        lambda: get_total_norm([more.grad], group=alone),
        lambda: GradClipper([("more", more)], 1e9, group=SELF).clip_(),
    )


@on_ranks(2)
def test_gradients_that_are_not_averaged_yet():
    model = DistributedDataParallel(mlp())
    clipper = GradClipper(model, 1.0)
    with model.join():
        for step in steps():
            with model.no_sync():
                backward(model, step)
                with refused("inside no_sync()"):
                    clip_grad_norm_(model, 1.0)
                with refused("inside no_sync()"):
                    clipper.clip_()
            backward(model, step)
            clip_grad_norm_(model, 1.0)


@on_ranks(2)
def test_lists_of_other_tensors():
    model = DistributedDataParallel(mlp())

    def check():
        doubled = [2 * one.grad for one in model.parameters()]
        for call in (get_total_norm, global_norm, lambda t: clip_by_global_norm(t, 1.0)[1]):
            with refused("[0], ", "not averaged by", "group=shardclip.SELF"):
                call(doubled)
        expected = 2 * exact_norm([one.grad for one in model.parameters()])
        assert float(get_total_norm(doubled, group=SELF)) == pytest.approx(expected, rel=1e-6)
        held = exact_norm(list(model.parameters()))  # as DDP has sent them to all
        assert float(get_total_norm(model.parameters())) == pytest.approx(held, rel=1e-6)

    train(model, check)


@on_ranks(2)
def test_gradients_that_are_read_elsewhere():
    model = DistributedDataParallel(mlp())
    clipper = GradClipper(model, 1.0, grad=lambda one: None if one.grad is None else 2 * one.grad)

    def check():
        with refused("0.weight, 0.bias", "not averaged by"):
            clipper.clip_()

    train(model, check)


@pytest.mark.parametrize(
    "options",
    [
        {"also": ("tokens",)},
        {"check_replicas": True},
        {"check_replicas": 4},
        {"nonfinite": "skip", "max_consecutive_skips": 3},
        {"max_norm": "rule"},
    ],
    ids=lambda options: next(reversed(options)),
)
@on_ranks(3)
def test_settings_that_need_every_rank_in_every_step(options):
    model = DistributedDataParallel(mlp())
    options = {"max_norm": float("inf")} | options
    if options["max_norm"] == "rule":
        options["max_norm"] = adaptive.AutoClip()
    clipper = GradClipper(model, **options)
    name = f"{list(options)[-1] if len(options) > 1 else 'max_norm'}="

    def check():
        with refused(name, "not inside join()"):
            clipper.clip_()

    train(model, check)
    backward(model, 0)
    clipper.clip_()  # all ranks are where they were


@on_ranks(3)
def test_clippers_are_built_before():
    model = DistributedDataParallel(mlp())
    calls = [
        lambda: GradClipper(model, 1.0),
        lambda: PerTensorClipper(model, 1.0),
        lambda: AdaptiveGradClipper(model),
        lambda: clip_grad_per_tensor_norm_(model, 1.0),
        lambda: adaptive_clip_grad_(model),
    ]

    def check():
        for call in calls:
            with refused("cannot be built inside join()", "Build it before"):
                call()

    train(model, check)


@on_ranks(2)
def test_what_sends_nothing_goes_on():
    model = DistributedDataParallel(mlp())

    def check():
        twin = copy.deepcopy(model.module)
        for one, other in zip(twin.parameters(), model.parameters(), strict=True):
            one.grad = other.grad.clone()
        clip_grad_value_(twin, 2.0**-10)
        assert max(float(one.grad.abs().max()) for one in twin.parameters()) == 2.0**-10

    train(model, check)
