"""The CPU kernel and its plain twin, against float64."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from shardclip.kernels import blocked, foreach, packing

KERNELS = pytest.mark.parametrize("kernel", [blocked, foreach], ids=["blocked", "foreach"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(tensor: torch.Tensor, p: float) -> float:
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).abs().flatten()
    if p == 0:
        return float(wide.count_nonzero())
    if math.isinf(p):
        return float(wide.max()) if wide.numel() else 0.0
    return math.fsum(wide.pow(p).tolist())


def assert_sums(kernel, tensors, p, rtol):
    found = kernel.PowerSums(tensors, range(len(tensors)), len(tensors))(tensors, p)
    assert found.dtype == torch.float64
    for value, tensor in zip(found.tolist(), tensors, strict=True):
        assert value == pytest.approx(exact(tensor, p), rel=rtol, abs=0)


def norm_bound(p):
    """What keeps the norm itself within 1e-6."""
    return 1e-6 * max(1.0, p if math.isfinite(p) else 1.0)


@KERNELS
@pytest.mark.parametrize("p", [0, 0.5, 1, 2, 3, math.inf])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.complex64], ids=str)
def test_sizes_around_the_blocks(kernel, p, dtype):
    sizes = [0, 1, 255, 256, 257, packing.SMALL - 1, packing.SMALL, blocked._BUFFER + 3]
    assert_sums(kernel, [torch.randn(n, dtype=dtype) for n in sizes], p, norm_bound(p))


@KERNELS
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e20, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_squares_neither_overflow_nor_underflow(kernel, scale, dtype):
    tensor = (torch.rand(100_000, dtype=torch.float64) * scale).to(dtype)
    assert float(tensor.max()) > 0
    assert_sums(kernel, [tensor, tensor[:5]], 2.0, 2e-6)


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_numbers_after_a_large_one_are_not_lost(kernel, dtype):
    tensor = torch.ones(1 << 20, dtype=dtype)
    tensor[:: blocked._ROW] = 4096  # the worst row there is: nothing after it changes the sum
    assert_sums(kernel, [tensor], 2.0, 2e-6)


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_does_not_add_up(kernel, dtype):
    assert_sums(kernel, [torch.full((1 << 22,), 0.01, dtype=dtype)], 2.0, 2e-6)
    assert_sums(kernel, [torch.full((1 << 22,), 0.01, dtype=dtype)], 1.0, 1e-6)


@KERNELS
@pytest.mark.parametrize("p", [0, 1, 2, 3, math.inf])
@pytest.mark.parametrize("size", [3, 70_000])
def test_a_nan_stays_in_its_bucket(kernel, p, size):
    bad = torch.ones(size)
    bad[size // 2] = math.nan
    tensors = [torch.ones(5), bad, torch.ones(7)]
    found = kernel.PowerSums(tensors, [0, 1, 2], 3)(tensors, p)
    assert found.isnan().tolist() == [False, True, False]


@KERNELS
@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
def test_infinity_is_infinite(kernel, p):
    tensors = [torch.tensor([1.0, -math.inf])]
    assert kernel.PowerSums(tensors, [0], 1)(tensors, p).tolist() == [math.inf]


@KERNELS
def test_buckets_gather_what_is_theirs(kernel):
    tensors = [torch.full((n,), float(n)) for n in (1, 2, 3, 4)]
    sums = kernel.PowerSums(tensors, [2, 0, 2, 0], 4)(tensors, 2.0).tolist()
    assert sums == pytest.approx([72.0, 0.0, 28.0, 0.0], rel=1e-6)
    assert kernel.PowerSums([], [], 2)([], 2.0).tolist() == [0.0, 0.0]


@KERNELS
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::3],
        lambda t: t[::2, 5:],
        lambda t: t.reshape(20, 10, 300).permute(2, 0, 1),
        lambda t: t[:1].expand(50, 300),
        lambda t: t[0, 0],
    ],
)
def test_any_stride(kernel, view):
    assert_sums(kernel, [view(torch.randn(200, 300))], 2.0, 1e-6)


@KERNELS
def test_conjugated_tensors(kernel):
    assert_sums(kernel, [torch.randn(1000, dtype=torch.complex64).conj()], 2.0, 1e-6)


@KERNELS
@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(kernel, default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert_sums(kernel, [torch.ones(70_001, dtype=torch.float32)], 0.0, 0)
        assert_sums(kernel, [torch.ones(70_001, dtype=torch.float32)], 2.0, 1e-6)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("part", [0.4, 0.4686, 0.2181])
def test_magnitudes_after_a_large_one_are_not_lost(part):
    tensor = torch.full((1 << 19,), part * 2**-23)
    tensor[0] = 1
    assert_sums(blocked, [tensor], 1.0, 1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40)))
def test_any_numbers(values):
    tensors = [torch.tensor(v, dtype=torch.float32) for v in values]
    assert_sums(blocked, tensors, 2.0, 2e-6)
    assert_sums(foreach, tensors, 2.0, 2e-6)
