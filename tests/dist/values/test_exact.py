"""exact=True: the same bits on any number of ranks, in any layout and order."""

import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from shardclip import (
    GradClipper,
    NonFiniteGradientError,
    ReplicaMismatchError,
    get_total_norm,
    global_norm,
)
from shardclip.step import overlap
from tests.ranks import (
    count_collectives,
    everywhere,
    on_ranks,
    raised_everywhere,
    run_on_ranks,
)
from tests.ranks.tensors import mesh_of, parameter, sharded
from tests.ranks.unsharded import assert_one_all_reduce

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS = {
    1: [((1,), (S0,))],
    2: [((2,), (S0,)), ((2,), (S1,)), ((2,), (R,))],
    3: [((3,), (S0,)), ((3,), (R,))],
    4: [((4,), (S0,)), ((2, 2), (R, S0)), ((2, 2), (S0, S1)), ((2, 2), (S1, R))],
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradients() -> list[torch.Tensor]:
    """Sizes over 60 binades: added in another order, their sum's last bits would differ."""
    made = []
    for index, dtype in enumerate(DTYPES * 2):
        generator = torch.Generator().manual_seed(index)
        values = torch.randn(37, 24, generator=generator) * 2.0 ** (4 * index - 12)
        made.append(values.to(dtype))
    return made


def rounded_once(p: int) -> float:
    """The norm from rational numbers."""
    total = sum(
        (Fraction(abs(x)) ** p for grad in gradients() for x in grad.double().flatten().tolist()),
        Fraction(0),
    )
    if p == 1:
        return total.numerator / total.denominator
    root = Fraction(math.isqrt(total.numerator * 2**400 // total.denominator), 2**200)
    return root.numerator / root.denominator  # 2^-200 off: no tie is near


def clipped_bits(sizes, placements) -> tuple[str, str, list[torch.Tensor]]:
    """Norm and coefficient as hexadecimal, and the whole clipped gradients."""
    mesh = mesh_of(*sizes)
    held = [parameter(sharded(grad, mesh, placements)) for grad in gradients()]
    clipper = GradClipper(held, 0.5, exact=True)
    with count_collectives() as calls:
        result = clipper.clip_()
    if dist.get_world_size() > 1:
        assert_one_all_reduce(calls)
    assert result.total_norm.dtype == torch.float64
    whole = [one.grad.full_tensor() for one in held]
    return float(result.total_norm).hex(), float(result.clip_coef).hex(), whole


def all_layouts() -> list[tuple[str, str, list[torch.Tensor]]]:
    return [clipped_bits(*layout) for layout in LAYOUTS[dist.get_world_size()]]


def test_same_bits_on_one_to_four_ranks_in_every_layout():
    found = []
    for ranks in LAYOUTS:
        for outcome in run_on_ranks(ranks, all_layouts):
            found += outcome
    norm, coef, whole = found[0]
    assert float.fromhex(norm) == rounded_once(2)
    assert len(found) == sum(ranks * len(layouts) for ranks, layouts in LAYOUTS.items())
    for other_norm, other_coef, other in found:
        assert (other_norm, other_coef) == (norm, coef)
        assert all(map(torch.equal, other, whole))


def plain_norms() -> list[str]:
    """The same without exact=True."""
    out = []
    for sizes, placements in LAYOUTS[dist.get_world_size()]:
        mesh = mesh_of(*sizes)
        held = [parameter(sharded(grad.float(), mesh, placements)) for grad in gradients()]
        out.append(float(GradClipper(held, None).clip_()._measured.total_norm).hex())
    return out


def test_without_it_the_last_bits_differ():
    outcomes = [outcome for ranks in LAYOUTS for outcome in run_on_ranks(ranks, plain_norms)]
    assert len({bits for outcome in outcomes for bits in outcome}) > 1


@pytest.mark.parametrize("p", [1, 2])
@on_ranks(2)
def test_functions(p):
    held = [sharded(grad, mesh_of(2), [S0]) for grad in gradients()]
    with count_collectives() as calls:
        total = get_total_norm(held, p, exact=True)
    assert_one_all_reduce(calls)
    assert total.dtype == torch.float64
    assert float(total) == rounded_once(p)
    if p == 2:
        assert float(global_norm([None, *held], exact=True)) == rounded_once(2)
    assert len(set(everywhere(float(total).hex()))) == 1


@on_ranks(2)
def test_groups_norms_numbers_and_settings_travel_as_integers():
    one, two = (parameter(sharded(grad, mesh_of(2), [S0])) for grad in gradients()[:2])
    three = parameter(gradients()[0])  # plain: a copy on both ranks
    clipper = GradClipper(
        [{"params": [one, two]}, {"params": [three], "max_norm": 1e9}],
        0.5,
        exact=True,
        norms="parameter",
        also=("loss", "tokens"),
        check_replicas=True,
    )
    for step in range(2):
        with count_collectives() as calls:
            result = clipper.clip_(also={"loss": 0.1 * (dist.get_rank() + 1), "tokens": 7})
        assert_one_all_reduce(calls)
        assert calls[0].dtype == torch.int64
        assert result.sums == {"loss": 0.1 + 0.2, "tokens": 14.0}
        squares = (Fraction(x) ** 2 for x in gradients()[0].double().flatten().tolist())
        expected = math.sqrt(sum(squares))
        assert abs(result.norms["group1.0"] - expected) <= 1e-15 * expected
        assert step or result.group_norms[1] == result.norms["group1.0"]


@on_ranks(4)
def test_copies_are_still_proved():
    made = parameter(torch.full((300,), float(dist.get_rank() == 2)))
    clipper = GradClipper([("w", made)], 1.0, exact=True)
    raised_everywhere(clipper.clip_, ReplicaMismatchError, "w: rank 2 differs")


@on_ranks(2)
def test_float64_gradients_are_exact_too():
    full = torch.randn(101, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    held = sharded(full * 1e-200, mesh_of(2), [S0])
    total = sum((Fraction(x) ** 2 for x in (full * 1e-200).tolist()), Fraction(0))
    root = Fraction(math.isqrt(total.numerator * 2**3000 // total.denominator), 2**1500)
    expected = root.numerator / root.denominator
    assert float(get_total_norm([held], exact=True)) == expected
    clipper = GradClipper([parameter(held)], None, exact=True)
    assert float(clipper.clip_().total_norm) == expected


@on_ranks(2)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(value):
    full = gradients()[0]
    full[3, 3] = value
    made = parameter(sharded(full, mesh_of(2), [S0]))
    assert math.isnan(float(get_total_norm([made.grad], exact=True))) == math.isnan(value)
    clipper = GradClipper([("w", made)], 1.0, exact=True, nonfinite="raise")
    raised_everywhere(clipper.clip_, NonFiniteGradientError, r"first at \[3, 3\]")
    copy = parameter(full.clone())
    clipper = GradClipper([("w", copy)], 1.0, exact=True, nonfinite="skip")
    assert clipper.clip_().skipped


@on_ranks(2)
def test_what_cannot_be_exact_is_refused():
    made = parameter(sharded(gradients()[0], mesh_of(2), [S0]))
    for p in (0.0, 3.0, math.inf):
        with pytest.raises(ValueError, match="exact=True takes norm_type 1 or 2"):
            GradClipper([made], 1.0, p, exact=True)
        with pytest.raises(ValueError, match="exact=True takes norm_type 1 or 2"):
            get_total_norm([made.grad], p, exact=True)
    wide = made
    clipper = GradClipper(
        [("w", wide)], 1.0, exact=True, grad=lambda one: torch.ones(3, dtype=torch.float64)
    )
    raised_everywhere(clipper.clip_, ValueError, "w: exact=True was set up for")


@on_ranks(2)
def test_with_overlap_and_skipping_and_a_scaler():
    """The same bits through hooks."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(64, 33), mesh=mesh_of(2))
    small, overlap.SMALL = overlap.SMALL, 1
    try:
        hooked = GradClipper(model, None, exact=True, overlap=True)
        plain = GradClipper(model, None, exact=True)
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(5, 64)).square().sum().backward()
            assert torch.equal(hooked.clip_().total_norm, plain.clip_().total_norm)
    finally:
        overlap.SMALL = small
