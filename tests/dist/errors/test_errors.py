"""Errors: on every rank alike, naming parameter and rank, with the gradients untouched."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial
from torch.testing._internal.two_tensor import TwoTensor

from shardclip import (
    GradClipper,
    NonFiniteGradientError,
    ReplicaMismatchError,
    clip_grad_norm_,
    clip_grads_with_norm_,
    get_total_norm,
)
from tests.ranks import count_collectives, on_ranks, raised_everywhere
from tests.ranks.tensors import S0, labelled, local_of, mesh_of, parameter, sharded
from tests.ranks.unsharded import CLIPS, assert_norm
from tests.ranks.warned import recorded

BOTH = pytest.mark.parametrize("clip", CLIPS)
F = torch.tensor


def good() -> nn.Parameter:
    return parameter(sharded(F([3.0, 4.0, 0.0, 0.0]), mesh_of(4), [S0]))


def bad_tensor(kind: str) -> torch.Tensor:
    return {
        "partial": lambda: labelled(torch.ones(2), mesh_of(4), Partial()),
        "meta": lambda: torch.ones(2, device="meta"),
        "integer": lambda: torch.ones(2, dtype=torch.int64),
        "subclass": lambda: TwoTensor(torch.ones(2), torch.ones(2)),
    }[kind]()


WORDS = {
    "partial": ["Partial", "reduce"],
    "meta": ["meta"],
    "integer": ["int"],
    "subclass": ["TwoTensor"],
}


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("rank", [1, 3])
@BOTH
@on_ranks(4)
def test_a_bad_gradient_on_one_rank_is_everyones_error(kind, rank, clip):
    module = nn.ParameterDict({"fine": good(), "odd": good()})
    if dist.get_rank() == rank:
        made = bad_tensor(kind)
        module["odd"] = nn.Parameter(made, requires_grad=made.is_floating_point())
        module["odd"].grad = bad_tensor(kind)
    before = local_of(module["fine"].grad).clone()
    raised_everywhere(
        lambda: CLIPS[clip](module, 0.1, 2.0),
        ValueError if kind == "partial" else (ValueError, TypeError),
        *WORDS[kind],
        "odd",
        rf"rank\w* {rank}\b",
    )
    assert torch.equal(local_of(module["fine"].grad), before)
    assert_norm(get_total_norm([good().grad]), 5.0)  # nothing is out of step


@pytest.mark.parametrize("kind", WORDS)
@on_ranks(4)
def test_a_bad_tensor_on_every_rank(kind):
    raised_everywhere(
        lambda: get_total_norm([good().grad, bad_tensor(kind)]),
        (ValueError, TypeError),
        *WORDS[kind],
    )


def raise_for_the_second(tensor):
    raise LookupError("no layout for the head")


BAD_LAYOUTS = {
    "raises": (raise_for_the_second, ["no layout for the head"]),
    "no mesh": (lambda tensor: (3, [S0]), ["mesh"]),
    "no pair": (lambda tensor: 17, ["layout"]),
    "too few placements": (lambda tensor: (mesh_of(2, 2), [S0]), ["placements"]),
}


@pytest.mark.parametrize("which", BAD_LAYOUTS)
@BOTH
@on_ranks(4)
def test_a_bad_layout_on_one_rank_is_everyones_error(which, clip):
    layout, words = BAD_LAYOUTS[which]
    mesh_of(2, 2)  # made here by all ranks alike
    made = parameter(torch.ones(2))

    def mine(tensor):
        return layout(tensor) if dist.get_rank() == 2 else None

    module = nn.ParameterDict({"head": made})
    raised_everywhere(
        lambda: CLIPS[clip](module, 0.1, 2.0, layout=mine),
        Exception,
        "head",
        r"rank\w* 2\b",
        *words,
    )
    assert made.grad.tolist() == [1, 1]


@pytest.mark.parametrize("norm_type", [math.nan, -1.0, -math.inf, "fro", None])
@on_ranks(2)
def test_a_bad_norm_type_is_refused_before_any_communication(norm_type):
    made = parameter(F([3.0, 4.0]))
    calls = [
        lambda: clip_grad_norm_([made], 1.0, norm_type),
        lambda: get_total_norm([made.grad], norm_type),
        lambda: GradClipper([made], 1.0, norm_type),
    ]
    for call in calls:
        with count_collectives() as seen, pytest.raises((ValueError, TypeError)):
            call()
        assert seen == []
    assert made.grad.tolist() == [3, 4]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@on_ranks(4)
def test_error_if_nonfinite_raises_on_every_rank(bad, rank, norm_type):
    full = torch.ones(4)
    full[rank] = bad
    made = parameter(sharded(full, mesh_of(4), [S0]))
    raised_everywhere(
        lambda: clip_grad_norm_([made], 0.1, norm_type, error_if_nonfinite=True),
        RuntimeError,
        "non-?finite",
    )
    raised_everywhere(
        lambda: get_total_norm([made.grad], norm_type, error_if_nonfinite=True), RuntimeError
    )
    torch.testing.assert_close(
        local_of(made.grad), full[dist.get_rank()][None], rtol=0, atol=0, equal_nan=True
    )


@on_ranks(4)
def test_error_if_nonfinite_raises_on_none_and_clips():
    made = good()
    assert_norm(clip_grad_norm_([made], 1.0, error_if_nonfinite=True), 5.0)
    assert local_of(made.grad).item() == pytest.approx((0.6, 0.8, 0, 0)[dist.get_rank()])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@on_ranks(4)
def test_raise_names_the_parameters_and_the_ranks(bad):
    full = torch.ones(4)
    full[1] = full[3] = bad
    pairs = [
        ("layers.0.weight", good()),
        ("layers.3.weight", parameter(sharded(full, mesh_of(4), [S0]))),
    ]
    clipper = GradClipper(pairs, 0.1, nonfinite="raise")
    message = raised_everywhere(
        clipper.clip_, NonFiniteGradientError, r"layers\.3\.weight", r"\b1\b.*\b3\b"
    )
    assert "layers.0.weight" not in message
    assert local_of(pairs[0][1].grad).item() == (3, 4, 0, 0)[dist.get_rank()]


@on_ranks(4)
def test_raise_does_not_step_and_goes_on_afterwards():
    made = good()
    optimizer = torch.optim.SGD([made], lr=1.0)
    clipper = GradClipper([("weight", made)], 1.0, nonfinite="raise")
    local_of(made.grad)[0] = math.nan if dist.get_rank() == 2 else 1.0
    raised_everywhere(lambda: clipper.step(optimizer), NonFiniteGradientError, "weight")
    assert local_of(made.data).item() == 0
    made.grad = good().grad
    assert_norm(clipper.step(optimizer).total_norm, 5.0)
    assert local_of(made.data).item() == pytest.approx((-0.6, -0.8, 0, 0)[dist.get_rank()])


@on_ranks(2)
def test_gradients_given_where_parameters_are_wanted():
    made = parameter(F([3.0, 4.0]))
    with pytest.raises(TypeError, match=r"\.grad"):
        clip_grads_with_norm_([made.grad], 1.0, F(5.0))
    with pytest.raises(TypeError, match=r"\.grad"):
        clip_grads_with_norm_(made.grad, 1.0, F(5.0))
    assert made.grad.tolist() == [3, 4]


@on_ranks(2)
def test_clip_grads_with_norm_scales_without_communication():
    made = parameter(sharded(F([3.0, 4.0]), mesh_of(2), [S0]))
    frozen = nn.Parameter(torch.zeros(2))
    norm = get_total_norm([made.grad])
    with count_collectives() as calls:
        assert clip_grads_with_norm_([made, frozen], 1.0, norm) is None
    assert calls == []
    assert local_of(made.grad).item() == pytest.approx((0.6, 0.8)[dist.get_rank()])
    assert frozen.grad is None


@BOTH
@on_ranks(2, fresh=True)
def test_no_gradient_on_any_rank_is_zero_with_one_warning(clip):
    made = nn.Parameter(sharded(torch.zeros(4), mesh_of(2), [S0]))
    clipper = GradClipper([made], 1.0)
    with recorded() as messages:
        for _ in range(3):
            norm = clipper.clip_().total_norm if clip == "clipper" else clip_grad_norm_([made], 1.0)
            assert_norm(norm, 0.0)
    assert len(messages) == 1, messages
    assert "gradient" in messages[0]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"nonfinite": "ignore"}, "nonfinite"),
        ({"norms": "layer"}, "norms"),
        ({"norm_type": math.inf, "also": ("loss",)}, "also"),
    ],
)
@on_ranks(2)
def test_bad_options_of_a_clipper_are_refused(options, word):
    made = parameter(F([3.0, 4.0]))
    with pytest.raises(ValueError, match=word):
        GradClipper([made], 1.0, **options)


@on_ranks(2)
def test_the_own_errors_are_runtime_errors():
    assert issubclass(NonFiniteGradientError, RuntimeError)
    assert issubclass(ReplicaMismatchError, RuntimeError)


@BOTH
@on_ranks(4)
def test_a_layout_that_says_partial_is_refused(clip):
    made = parameter(F([3.0, 4.0]))
    before = made.grad.clone()

    def call():
        CLIPS[clip]([made], 1.0, 2.0, layout=(mesh_of(4, names=("dp",)), (Partial(),)))

    raised_everywhere(call, ValueError, "Partial", "'dp'")
    assert made.grad.equal(before)
