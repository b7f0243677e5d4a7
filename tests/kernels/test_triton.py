"""The Triton kernels, on a CUDA device, or without one through Triton's interpreter on CPU."""

import math
import os
import subprocess
import sys

import pytest
import torch

from shardclip import kernels
from shardclip.kernels import foreach, fused, programs
from shardclip.step import scale

from .test_kernels import exact, norm_bound

# The interpreter computes with numpy, which warns of what a device does in silence; and that of
# Triton 3.4 makes an int of an array of one number, where a loop's bound was loaded.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning",
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning",
)

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
TILE, BLOCK = programs.TILE.value, programs.BLOCK.value
SINGLE = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*SINGLE, torch.float64]
POWERS = pytest.mark.parametrize("p", [0, 1, 2, math.inf])


def assert_sums(tensors, p, rtol=None):
    rtol = norm_bound(p) if rtol is None else rtol
    kernel = fused.PowerSums(tensors, range(len(tensors)), len(tensors))
    found = kernel(tensors, p)
    assert found.dtype == torch.float64
    assert found.device == DEVICE
    assert found.tolist() == kernel.each.tolist()
    for value, tensor in zip(found.tolist(), tensors, strict=True):
        assert value == pytest.approx(exact(tensor, p), rel=rtol, abs=0)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


@POWERS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_around_the_blocks(dtype, p):
    sizes = [0, 1, 7, TILE - 1, TILE, TILE + 1, BLOCK - 1, BLOCK, BLOCK + 1]
    assert_sums([randn(n, dtype=dtype) for n in sizes], p)


@pytest.mark.parametrize("ahead", [1, 4, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_alignment(dtype, ahead):
    whole = torch.full((BLOCK + 16,), 100, dtype=dtype, device=DEVICE)  # what lies outside shows
    views = [whole[ahead:][:size] for size in (3, BLOCK - ahead, BLOCK)]
    for view in views:
        view.copy_(torch.randn(view.shape))
    assert_sums(views, 2.0)


@pytest.mark.parametrize("p", [0.5, 3])
def test_other_norm_types_are_left_to_foreach(p):
    tensors = [randn(300), randn(50)]
    kernel = fused.PowerSums(tensors, [0, 0], 1)
    assert torch.equal(kernel(tensors, p), foreach.PowerSums(tensors, [0, 0], 1)(tensors, p))
    assert kernel.each is not None
    assert kernel.nonfinite is None


@POWERS
def test_complex_numbers(p):
    tensor = randn(1000, dtype=torch.complex64)
    assert_sums([tensor, tensor.conj(), tensor.conj().imag], p)


@pytest.mark.parametrize("scale", [1e-39, 1e-30, 1e-20, 1e-12, 1e20, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_squares_neither_overflow_nor_underflow(dtype, scale):
    tensor = (torch.rand(BLOCK + 99, dtype=torch.float64) * scale).to(dtype).to(DEVICE)
    assert float(tensor.max()) > 0
    assert_sums([tensor, tensor[:5]], 2.0, 1e-6)
    assert_sums([tensor, tensor[:5]], 1.0)


def test_largest_and_smallest_half():
    assert_sums([torch.full((BLOCK,), 65504.0, device=DEVICE).half()], 2.0)
    assert_sums([torch.full((BLOCK,), 2.0**-24, device=DEVICE).half()], 2.0)


@pytest.mark.parametrize("dtype", SINGLE, ids=str)
@pytest.mark.parametrize("every", [TILE, BLOCK])
def test_small_numbers_after_large_ones_are_not_lost(dtype, every):
    tensor = torch.ones(2 * BLOCK, dtype=dtype, device=DEVICE)
    tensor.view(-1, every)[:, : programs.COLUMNS.value] = 4096  # in float32, 2^24 + 1 is 2^24
    assert_sums([tensor], 2.0, 5e-7)  # eight roundings at most


def test_rounding_does_not_add_up():
    assert_sums([torch.full((16 * BLOCK,), 0.01, device=DEVICE)], 2.0, 5e-7)


def test_blocks_are_combined_in_float64():
    totals = torch.ones(64, programs.COLUMNS.value, dtype=torch.float64, device=DEVICE)
    totals[0] = 2.0**53 - 64  # the next 63 ones just fit
    ranges = torch.tensor([[0, totals.numel()], [3, 5]], device=DEVICE)
    sums, counts = (torch.empty(2, dtype=torch.float64, device=DEVICE) for _ in range(2))
    launch = programs.combine[(2,)]
    launch(ranges, totals, torch.ones_like(totals), sums, counts, 2.0, num_warps=programs.WARPS)
    assert sums.tolist() == [(2.0**53 - 1) * programs.COLUMNS.value, 2 * (2.0**53 - 64)]
    assert counts.tolist() == [totals.numel(), 2]


@POWERS
def test_zeros_are_zero(p):
    assert_sums([torch.zeros(TILE + 5, device=DEVICE)], p, 0)


@POWERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_nonfinite_numbers_stay_where_they_are_and_are_counted(dtype, p):
    tensors = [torch.ones(n, dtype=dtype, device=DEVICE) for n in (5, BLOCK + 9, 7, 3)]
    tensors[1][[0, 77, BLOCK + 2]] = math.nan
    tensors[2][1] = -math.inf
    kernel = fused.PowerSums(tensors, [1, 0, 1, 2], 4)
    totals = kernel(tensors, p)
    assert kernel.nonfinite.tolist() == [0, 3, 1, 0]
    assert kernel.nonfinite_in_buckets.tolist() == [3, 1, 0, 0]
    assert totals.isnan().tolist() == [True, False, False, False]
    assert kernel.each.isnan().tolist() == [False, True, False, False]
    assert totals[1] == (12 if p == 0 else math.inf)
    assert totals[2:].tolist() == [1 if p == math.inf else 3, 0]


@POWERS
def test_one_launch_reads_many_tensors_of_all_dtypes(p, monkeypatch):
    tensors = [randn(1 + n, dtype=DTYPES[n % 4]) for n in range(30)]
    buckets = [n * n % 7 for n in range(30)]
    launches = []
    launch = programs.sum_blocks
    counted = {"__getitem__": lambda self, grid: (launches.append(grid), launch[grid])[1]}
    monkeypatch.setattr(programs, "sum_blocks", type("Counted", (), counted)())
    kernel, plain = (k.PowerSums(tensors, buckets, 8) for k in (fused, foreach))
    totals = kernel(tensors, p)
    torch.testing.assert_close(totals, plain(tensors, p), rtol=1e-6, atol=0)
    torch.testing.assert_close(kernel.each, plain.each, rtol=1e-6, atol=0)
    assert launches == [(30,)]


def test_the_same_bits_every_time():
    tensors = [randn(3 * BLOCK), randn(1000)]
    kernel = fused.PowerSums(tensors, [0, 0], 1)
    first, each = kernel(tensors, 2.0), kernel.each
    assert torch.equal(first, kernel(tensors, 2.0))
    assert torch.equal(each, kernel.each)


STRIDES = pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::3],
        lambda t: t[::2, 5:],
        lambda t: t.reshape(20, 10, 30).permute(2, 0, 1),
        lambda t: t[0, 0],
    ],
)


@STRIDES
def test_sums_of_any_stride(view):
    assert_sums([view(randn(200, 30))], 2.0)


def test_sums_of_an_expanded_tensor():
    assert_sums([randn(1, 30).expand(50, 30)], 2.0)


def expected_product(tensor, coef):
    """Multiply in float32, and round once more to 16 bits."""
    if tensor.dtype in (torch.float64, torch.complex128):
        return tensor * coef
    wide = torch.complex64 if tensor.is_complex() else torch.float32
    return (tensor.to(wide) * torch.tensor(coef, dtype=torch.float32)).to(tensor.dtype)


def multiply(tensors, coef):
    fused.multiply_(tensors, torch.tensor(coef, dtype=torch.float64, device=DEVICE))


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_products_are_rounded_once_and_nothing_beside_is_touched(dtype):
    sizes = [0, 1, TILE + 1, BLOCK + 3, 17]
    wholes = [randn(n + 5, dtype=dtype) for n in sizes]
    expected = [whole.clone() for whole in wholes]
    for n, one in zip(sizes, expected, strict=True):
        one[3 : 3 + n] = expected_product(one[3 : 3 + n], 0.3)
    multiply([whole[3 : 3 + n] for n, whole in zip(sizes, wholes, strict=True)], 0.3)
    for found, one in zip(wholes, expected, strict=True):
        assert_same(found, one)


@pytest.mark.parametrize("coef", [0.3, 0.0, 3.0, math.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number(dtype, coef):
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).to(DEVICE).view(dtype)
    expected = expected_product(numbers, coef)
    multiply([numbers], coef)
    assert_same(numbers, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_nan_of_a_device_stays_one(dtype):
    tensor = torch.ones(3, dtype=dtype, device=DEVICE)
    nan = torch.tensor(torch.iinfo(torch.int64).max, device=DEVICE).view(torch.float64)
    assert nan.isnan()  # all bits are set, as CUDA has it: rounded as a number, it would turn to -0
    fused.multiply_([tensor], nan)
    assert tensor.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_leaves_every_bit(dtype):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    pattern = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, (999,), dtype=bits)
    special = torch.tensor([-0.0, math.nan, -math.nan, math.inf], dtype=dtype)
    tensor = torch.cat([special, pattern.view(dtype)]).to(DEVICE)
    before = tensor.clone()
    multiply([tensor], 1.0)
    assert torch.equal(tensor.view(bits), before.view(bits))


def test_one_reads_nothing():
    blocks = fused._cut_once(((TILE, torch.float32),), DEVICE)
    nowhere = torch.zeros(1, dtype=torch.int64, device=DEVICE)  # reading here would be a fault
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    launch = programs.multiply_blocks[(1,)]
    launch(nowhere, blocks.tensors, blocks.blocks, 1, one, None, num_warps=programs.WARPS)


@pytest.mark.parametrize("coef", [1e-32, 1e-42, 5e-324])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_coefficient_below_float32(dtype, coef):
    tensor = torch.full((5,), torch.finfo(dtype).max, dtype=dtype, device=DEVICE)
    expected = (tensor.double() * coef).to(dtype)
    multiply([tensor], coef)
    torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=2e-45)


@STRIDES
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_products_of_any_stride(view, dtype):
    whole = randn(200, 30, dtype=dtype)
    expected = whole.clone()
    view(expected).mul_(0.5)
    multiply([view(whole), whole[:0]], 0.5)
    assert_same(whole, expected)


def test_products_of_conjugated_tensors():
    tensor = randn(50, dtype=torch.complex64)
    expected = tensor * 0.5
    multiply([tensor.conj()], 0.5)
    assert_same(tensor, expected)


def test_autograd_sees_that_a_tensor_has_changed():
    tensors = [randn(5), randn(5, 5).t()]
    multiply(tensors, 0.5)
    assert [tensor._version for tensor in tensors] == [1, 1]


def test_scaling_is_by_triton_where_it_works(monkeypatch):
    called = []
    monkeypatch.setattr(kernels, "available", lambda device: True)
    monkeypatch.setattr(fused, "multiply_", lambda tensors, coef: called.append(len(tensors)))
    scale.scale_([randn(3), randn(4)], torch.tensor(0.5, dtype=torch.float64, device=DEVICE))
    assert called == [2]


def test_without_a_device_triton_is_not_used():
    assert not kernels.available(torch.device("cpu"))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a CUDA device")
def test_what_does_not_work_is_said_and_not_used(caplog):
    assert not kernels.available(torch.device("cuda", 0))
    assert "foreach calls" in caplog.text
    kernels.available.cache_clear()


def test_tables_are_not_made_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(fused, "_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="once before capturing"):
        fused.PowerSums([randn(3)], [0], 1)


COMPILE = r"""
import re
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shardclip.kernels import programs

def ptx(program, constants, **types):
    kinds = {**types, **{name: "constexpr" for name in constants}}
    names = list(kinds)
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(kinds.values()) if "*" in t}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(program, kinds, values, aligned)
    options = {"num_warps": programs.WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

tables = {"addresses": "*i64", "tensors": "*i64", "blocks": "*i64"}
for dtype in (tl.float32, tl.bfloat16, None):
    sums = {**tables, "totals": "*fp64", "bad": "*fp64"}
    texts = [ptx(programs.sum_blocks, {"dtype": dtype, "p": 2}, **sums)]
    scaling = {**tables, "count": "i32", "coef": "*fp64"}
    texts.append(ptx(programs.multiply_blocks, {"dtype": dtype}, **scaling))
    assert "st.global.v4" in texts[1]
    for text in texts:
        assert "ld.global.v4" in text  # 16 bytes at once
        assert ".ftz" not in text  # subnormal numbers count
        assert not re.search(r"\batom\b|\bred\b", text)  # the order of sums is fixed
    assert "bar.sync" not in texts[1] or dtype is None  # tiles stay in their threads' registers
ranges = {"ranges": "*i64", "totals": "*fp64", "bad": "*fp64", "total": "*fp64", "count": "*fp64"}
ptx(programs.combine, {"p": float("inf")}, **ranges)
"""


@pytest.mark.processes
def test_programs_compile_for_a_gpu_that_is_not_here(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
