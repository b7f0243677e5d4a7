"""Drawn at random: meshes, placements, shapes, dtypes and values, against float64."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from shardclip import GradClipper, clip_grad_norm_
from tests.ranks import count_collectives, run_on_ranks
from tests.ranks.tensors import (
    ROUNDING,
    SUBNORMAL,
    Sharded,
    coefficient,
    exact_norm,
    local_of,
    mesh_of,
    mesh_over,
    parameter,
    scaled,
    strided,
)
from tests.ranks.warned import recorded

# Mesh shapes over four ranks; a letter is an axis of a root mesh of 2 x 2; a tuple of
# ranks under "own" is a mesh that is nobody's part; None is a plain, replicated tensor.
MESHES = [(4,), (2, 2), (1, 4), (4, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1)]
PARTS = ["dp", "tp"]
OWN = [(0, 1), (1, 3), (2,), (0, 2, 3)]
EXPONENTS = {torch.float16: (-3, 3)}  # of ten; the others take -20 to 20
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
LENGTHS = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 13])


@dataclass(frozen=True)
class Drawn:
    """One tensor: where it lies and how its values are made from a seed."""

    mesh: object
    placements: tuple[tuple[str, int, int], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    exponent: int
    spread: int
    bad: float | None
    seed: int

    def full(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        values = torch.randn(self.shape, generator=generator, dtype=wide)
        powers = torch.randint(-self.spread, 1, self.shape, generator=generator)
        values = (values * 10.0 ** (powers + self.exponent)).to(self.dtype)
        if self.bad is not None and values.numel():
            at = torch.randint(values.numel(), (1,), generator=generator)
            values.view(-1)[at] = self.bad
        return values

    def tensor(self) -> Sharded:
        if self.mesh is None:
            return Sharded(self.full())
        if isinstance(self.mesh, str):
            mesh = mesh_of(2, 2, names=("dp", "tp"))[self.mesh]
        elif self.mesh[0] == "own":
            mesh = mesh_over(*self.mesh[1:])
        else:
            mesh = mesh_of(*self.mesh)
        made = {
            "R": lambda dim, factor: Replicate(),
            "S": lambda dim, factor: Shard(dim),
            "strided": strided,
        }
        placements = tuple(made[kind](dim, factor) for kind, dim, factor in self.placements)
        return Sharded(self.full(), mesh, placements)


@st.composite
def drawn_tensors(draw, nonfinite: bool) -> Drawn:
    mesh = draw(
        st.sampled_from(MESHES)
        | st.sampled_from([None, *PARTS])
        | st.sampled_from([("own", *ranks) for ranks in OWN])
    )
    shape = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=3)))
    sizes = mesh if isinstance(mesh, tuple) and mesh[0] != "own" else (2,)
    dims = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in sizes]
    placements = []
    for axis, dim in enumerate(dims):
        later = [sizes[i] for i in range(axis + 1, len(sizes)) if dims[i] == dim]
        if dim is None:
            placements.append(("R", 0, 0))
        elif later and draw(st.booleans()):
            placements.append(("strided", dim, math.prod(later)))
        else:
            placements.append(("S", dim, 0))
    dtype = draw(st.sampled_from(DTYPES[:-1] if nonfinite else DTYPES))
    return Drawn(
        mesh=mesh,
        placements=tuple(placements),
        shape=shape,
        dtype=dtype,
        exponent=draw(st.integers(*EXPONENTS.get(dtype, (-20, 20)))),
        spread=draw(st.sampled_from([0, 2, 8])),
        bad=draw(st.sampled_from([math.inf, -math.inf, math.nan])) if nonfinite else None,
        seed=draw(st.integers(0, 2**16)),
    )


def clip_drawn(drawn: list[Drawn], norm_type: float, share: float, through: str) -> dict:
    """On a rank: clip, and say what came out and what differs from the unsharded answer.

    Errors are returned, not raised, so that hypothesis can shrink without new ranks.
    """
    tensors = [one.tensor() for one in drawn]
    expected = exact_norm([tensor.full for tensor in tensors], norm_type)
    max_norm = share * expected if 0 < expected < math.inf else share
    mine = [tensor for tensor in tensors if tensor.here]
    made = [parameter(tensor.build()) for tensor in mine]
    with recorded() as messages:
        try:
            if through != "function":
                names = [f"weight{i}" for i, tensor in enumerate(tensors) if tensor.here]
                pairs = list(zip(names, made, strict=True))
                given = made if through == "clipper" else pairs
                clipper = GradClipper(given, max_norm, norm_type)
            with count_collectives() as calls:
                if through != "function":
                    norm = clipper.clip_().total_norm
                else:
                    norm = clip_grad_norm_(made, max_norm, norm_type)
        except Exception as error:
            return {"error": repr(error)}
    factor = coefficient(expected, max_norm)
    return {
        "expected": expected,
        "norm": norm.double().item(),
        "calls": [(call.op, call.numel) for call in calls],
        "differ": [d for d in map(difference, mine, made, [factor] * len(made)) if d],
        "odd warnings": [m for m in messages if "layout=" not in m and "gradient" not in m],
    }


def difference(tensor: Sharded, made, factor: float) -> str | None:
    expected = local_of(tensor.build(scaled(tensor.full, factor)))
    rtol, atol = ROUNDING[expected.dtype], SUBNORMAL[expected.dtype]
    got = local_of(made.grad)
    if torch.allclose(got, expected, rtol=rtol, atol=atol, equal_nan=True):
        return None
    return f"{got} is not {expected} (times {factor})"


def assert_answers(answers: list[dict]) -> None:
    first = answers[0]
    assert "error" not in first, first
    assert all(answer["norm"].hex() == first["norm"].hex() for answer in rounded(answers)), answers
    norm, expected = first["norm"], first["expected"]
    if math.isfinite(expected):
        assert norm == pytest.approx(expected, rel=1e-6, abs=2.0**-149)
    else:
        assert repr(norm) == repr(expected)
    for answer in answers:
        assert [op for op, _ in answer["calls"]] == ["all_reduce"]
        assert answer["calls"] == first["calls"]
        assert answer["differ"] == []
        assert answer["odd warnings"] == []


def rounded(answers: list[dict]) -> list[dict]:
    """A rank without float64 gradients rounds to float32; compare all in that."""
    for answer in answers:
        answer["norm"] = torch.tensor(answer["norm"], dtype=torch.float32).item()
    return answers


POWERS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, math.inf])
THROUGH = st.sampled_from(["function", "named clipper", "clipper"])
SETTINGS = settings(
    derandomize=True,
    deadline=None,
    max_examples=250,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@SETTINGS
@given(
    drawn=st.lists(drawn_tensors(nonfinite=False), min_size=1, max_size=5),
    norm_type=POWERS,
    share=st.sampled_from([0.01, 0.5, 2.0]),
    through=THROUGH,
)
def test_any_layout_gives_the_unsharded_answer(drawn, norm_type, share, through):
    assert_answers(run_on_ranks(4, clip_drawn, drawn, norm_type, share, through))


@SETTINGS
@given(
    good=st.lists(drawn_tensors(nonfinite=False), max_size=2),
    bad=st.lists(drawn_tensors(nonfinite=True), min_size=1, max_size=2),
    norm_type=st.sampled_from([0.5, 1.0, 2.0, 3.0, math.inf]),
    through=THROUGH,
)
def test_non_finite_values_anywhere_give_the_unsharded_answer(good, bad, norm_type, through):
    assert_answers(run_on_ranks(4, clip_drawn, [*good, *bad], norm_type, 0.5, through))
