"""Faults that users met in range and precision; each input plain, sharded and replicated."""

import math

import pytest
import torch
import torch.distributed as dist

from shardclip import SELF, GradClipper, clip_grad_norm_, get_total_norm
from tests.ranks import on_ranks
from tests.ranks.tensors import S0, R, Sharded, exact_norm, labelled, mesh_of, parameter
from tests.ranks.unsharded import CLIPS, assert_clips_as_unsharded, assert_norm

BOTH = pytest.mark.parametrize("clip", CLIPS)
PLACES = pytest.mark.parametrize("place", ["plain", "sharded", "replicated"])
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def at(place: str, *fulls: torch.Tensor) -> list[Sharded]:
    if place == "plain":
        return [Sharded(full) for full in fulls]
    return [Sharded(full, mesh_of(2), (S0 if place == "sharded" else R,)) for full in fulls]


@PLACES
@BOTH
@on_ranks(2)
def test_a_million_bfloat16_hundredths(place, clip):
    (tensor,) = at(place, torch.full((1000, 1000), 0.01, dtype=BF16))
    assert_norm(CLIPS[clip]([parameter(tensor.build())], 100.0, 2.0), 10.009765625)
    assert_clips_as_unsharded([tensor], clip=CLIPS[clip])


@PLACES
@BOTH
@pytest.mark.parametrize("pieces", [1, 1000])
@on_ranks(2)
def test_a_thousand_bfloat16_ones(place, clip, pieces):
    fulls = torch.ones(1000, dtype=BF16).split(1000 // pieces)
    assert_norm(
        CLIPS[clip]([parameter(t.build()) for t in at(place, *fulls)], 99.0, 2.0), math.sqrt(1000)
    )


@PLACES
@BOTH
@on_ranks(2)
def test_float16_squares_do_not_overflow(place, clip):
    # fairscale #263, Automodel #825
    (tensor,) = at(place, torch.full((65536,), 300.0, dtype=F16))
    made = parameter(tensor.build())
    assert_norm(CLIPS[clip]([made], 1.0, 2.0), 76800.0)
    values = made.grad if place == "plain" else made.grad.to_local()
    torch.testing.assert_close(
        values, torch.full_like(values, 300 / 76800), rtol=2**-10, atol=2**-24
    )


@PLACES
@BOTH
@on_ranks(2)
def test_float32_squares_do_not_overflow(place, clip):
    (tensor,) = at(place, torch.full((100,), 1e20))
    made = parameter(tensor.build())
    assert_norm(CLIPS[clip]([made], 1.0, 2.0), 1e21)
    values = made.grad if place == "plain" else made.grad.to_local()
    torch.testing.assert_close(values, torch.full_like(values, 0.1), rtol=2e-6, atol=0)


@on_ranks(2)
def test_64_mi_float32_normals():
    """Each rank makes its half; the answer is summed in float64, block by block."""
    torch.manual_seed(dist.get_rank())
    mine = torch.randn(32 * 2**20)
    squares = sum(block.double().square().sum() for block in mine.split(2**20))
    dist.all_reduce(squares)
    made = parameter(labelled(mine, mesh_of(2), S0))
    assert_norm(clip_grad_norm_([made], 1e9), squares.sqrt().item())


@on_ranks(2)
def test_a_large_replicated_tensor_is_split_among_its_replicas_and_exact():
    torch.manual_seed(1)
    full = torch.randn(8 * 2**20 + 3)
    squares = sum(block.double().square().sum() for block in full.split(2**20))
    made = parameter(labelled(full, mesh_of(2), R))
    assert_norm(GradClipper([made], 1e9).clip_().total_norm, squares.sqrt().item())


@PLACES
@BOTH
@on_ranks(2)
def test_mixed_dtypes_are_scaled_each_in_its_own(place, clip):
    # accelerate #1628
    tensors = at(place, torch.tensor([3.0]), torch.tensor([4.0], dtype=BF16))
    made = [parameter(t.build()) for t in tensors]
    assert_norm(CLIPS[clip](made, 100.0, 2.0), 5.0)
    assert [one.grad.dtype for one in made] == [F32, BF16]
    assert_clips_as_unsharded(tensors, clip=CLIPS[clip], share=0.2)


SCALES = [
    (F32, 1e-20),
    (F32, 1e-10),
    (F32, 1e10),
    (F32, 1e20),
    (BF16, 1e-20),
    (BF16, 1e-10),
    (BF16, 1e10),
    (BF16, 1e20),
    (F16, 1e-3),
    (F16, 1e3),
    (torch.float64, 1e-20),
    (torch.float64, 1e20),
]


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, math.inf])
@pytest.mark.parametrize(("dtype", "scale"), SCALES)
@pytest.mark.parametrize("place", ["plain", "sharded"])
@on_ranks(2)
def test_every_dtype_at_every_scale(dtype, scale, norm_type, place):
    full = (torch.randn(70_000, dtype=torch.float64) * scale).to(dtype)
    (tensor,) = at(place, full)
    assert_norm(
        get_total_norm([tensor.build()], norm_type), exact_norm([full], norm_type), rtol=1e-6
    )


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@BOTH
@on_ranks(2)
def test_thousands_of_small_tensors(dtype, norm_type, clip):
    fulls = [torch.randn(7, 3).to(dtype) for _ in range(1000)]
    tensors = at("plain", *fulls[:500]) + at("sharded", *fulls[500:])
    assert_clips_as_unsharded(tensors, norm_type, CLIPS[clip])


@pytest.mark.parametrize("order", ["large first", "small first"])
@on_ranks(2)
def test_small_values_beside_large_ones_are_not_lost(order):
    """4 Mi ones beside a 4096: both halves of the answer matter."""
    parts = [torch.ones(4 * 2**20), torch.full((1,), 4096.0)]
    full = torch.cat(parts if order == "small first" else parts[::-1])
    made = parameter(Sharded(full, mesh_of(2), (S0,)).build())
    assert_norm(clip_grad_norm_([made], 1e9), math.sqrt(4 * 2**20 + 4096.0**2))


@pytest.mark.parametrize("exponent", [-149, -126, -100, 100, 127])
@on_ranks(2)
def test_the_ends_of_float32s_range(exponent):
    """Squares of these are far outside float32; 2^-149 is its smallest subnormal."""
    value = 2.0**exponent
    full = torch.tensor([value, 0.0, 0.0, value])
    expected = torch.tensor(math.sqrt(2) * value, dtype=torch.float64).to(F32).item()
    norm = get_total_norm([full]).item()
    assert norm == pytest.approx(expected, rel=1e-6, abs=2.0**-149)


@pytest.mark.parametrize(
    ("dtypes", "result"),
    [
        ([F32], F32),
        ([BF16], F32),
        ([F16, F32], F32),
        ([torch.float64], torch.float64),
        ([F32, torch.float64], torch.float64),
        ([torch.complex64], F32),
        ([torch.complex128], torch.float64),
    ],
)
@pytest.mark.parametrize("everywhere", [True, False])
@on_ranks(2)
def test_the_norms_dtype_is_this_ranks(dtypes, result, everywhere):
    """The other rank may have other dtypes: its own norm's dtype is its own."""
    mine = everywhere or dist.get_rank() == 0
    dtypes, result = (dtypes, result) if mine else ([F32], F32)
    tensors = [labelled(torch.ones(1, dtype=dtype), mesh_of(2), S0) for dtype in dtypes]
    norm = get_total_norm(tensors)
    assert norm.dtype == result
    assert norm.shape == ()


@on_ranks(2)
def test_complex_gradients_count_their_magnitude():
    full = torch.tensor([3 + 4j, 0 + 12j])
    tensor = Sharded(full, mesh_of(2), (S0,))
    assert_clips_as_unsharded([tensor])
    assert_clips_as_unsharded([tensor], norm_type=1.0)
    assert_clips_as_unsharded([tensor], norm_type=math.inf)
    assert_norm(get_total_norm([full], group=SELF), 13.0)
