"""The exact sums' Triton kernel, on a CUDA device, or without one through Triton's interpreter."""

import math
import os
import subprocess
import sys

import pytest
import torch

from shardclip.kernels import exact as plain
from shardclip.kernels import exact_programs, exact_triton
from shardclip.math import exact, windows
from tests.math.test_exact import POWERS, power_sum, raw, value, wide

# The interpreter computes with numpy, which warns of what a device does in silence; and that of
# Triton 3.4 makes an int of an array of one number, where a loop's bound was loaded.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning",
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning",
)

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", list(exact_triton._DTYPES), ids=str)
TILE = exact_programs.TILE.value


@pytest.fixture(autouse=True)
def _several_pieces(monkeypatch):
    monkeypatch.setattr(exact_triton, "_PIECE", 4 * TILE)


def lanes_of(tensors, p, window=windows.SINGLE):
    return exact_triton.ExactSums(tensors, [0] * len(tensors), 1, window)(tensors, p)


def assert_exact(tensor, p):
    lanes = lanes_of([tensor.to(DEVICE)], p)[0]
    assert lanes.device == DEVICE
    assert int(lanes.abs().max()) < 2**32
    assert value(lanes, windows.SINGLE) == power_sum(tensor, p)
    nans, bad = int(tensor.isnan().sum()), int((~tensor.isfinite()).sum())
    assert lanes[windows.SINGLE.digits :].tolist() == [bad, nans]


@POWERS
@DTYPES
@pytest.mark.parametrize("make", [raw, wide], ids=["raw", "wide"])
@pytest.mark.parametrize("size", [1, 2, TILE - 1, TILE, TILE + 1, 4 * TILE + 3])
def test_any_bits(dtype, p, make, size):
    assert_exact(make(dtype, size, size), p)


@POWERS
@DTYPES
def test_the_ends_of_the_range(dtype, p):
    largest = torch.full((TILE + 1,), torch.finfo(dtype).max, dtype=dtype)
    tiny = (torch.arange(TILE + 1) % 3).to(torch.int32 if dtype.itemsize == 4 else torch.int16)
    for tensor in (largest, tiny.view(dtype), torch.cat([largest, tiny.view(dtype)]), largest * 0):
        assert_exact(tensor, p)


@POWERS
def test_the_plain_twin_agrees(p):
    base = torch.randn(60, 50, device=DEVICE) * 1e-3
    tensors = [
        base,
        base.t(),
        base[::2, 5:],
        base[:1].expand(40, 50),
        base[0, 0],
        torch.empty(0, 7, device=DEVICE),
        base.bfloat16()[1:],
        base.half()[1:],
        base.double(),
        base.reshape(6, 10, 50).permute(2, 0, 1),
    ]
    tensors += [torch.view_as_complex(base.view(60, 25, 2)).conj()] if p == 2 else []
    buckets = [index % 4 for index in range(len(tensors))]
    window = windows.DOUBLE
    found = exact_triton.ExactSums(tensors, buckets, 5, window)(tensors, p)
    twin = plain.ExactSums(tensors, buckets, 5, window)(tensors, p)
    for mine, other in zip(found.cpu(), twin.cpu(), strict=True):
        assert value(mine, window) == value(other, window)
    assert torch.equal(exact.finish(found, p, window), exact.finish(twin, p, window))
    for rows in (1, 20):
        narrow = exact_triton.ExactSums(tensors[:1], [0], 1, windows.SINGLE)(tensors[:1], p)
        norm = exact.finish(narrow.expand(rows, -1), p, windows.SINGLE)
        assert norm.tolist() == pytest.approx([float(base.double().norm(p))] * rows, rel=1e-12)


def test_nothing_to_sum():
    assert exact_triton.ExactSums([], [], 2, windows.SINGLE)([], 2).tolist() == [[0] * 22] * 2


@pytest.mark.parametrize("numbers", [(1.0, math.inf), (math.nan, 1.0), (-math.inf, math.nan)])
@DTYPES
def test_infinities_and_nan(dtype, numbers):
    tensor = torch.tensor(numbers, dtype=dtype).repeat(TILE)
    assert_exact(tensor, 2)


def test_what_cannot_be_exact_is_rejected():
    for tensor, p in ((torch.ones(3), 3), (torch.ones(3, dtype=torch.complex64), 1)):
        with pytest.raises(ValueError, match="exact=True"):
            lanes_of([tensor.to(DEVICE)], p)
    with pytest.raises(ValueError, match="wider window"):
        lanes_of([torch.ones(3, dtype=torch.float64, device=DEVICE)], 2)
    huge = torch.ones(1, device=DEVICE).expand(exact_triton.MAX_ELEMENTS_HERE + 1)
    with pytest.raises(ValueError, match="2\\^35 elements"):
        exact_triton.ExactSums([huge], [0], 1, windows.SINGLE)


COMPILE = r"""
import re
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shardclip.kernels import exact_programs, exact_triton

tables = {"addresses": "*i64", "pieces": "*i64", "lanes": "*i64"}
for dtype in (tl.float32, tl.bfloat16, tl.float16):
    for p in (1, 2):
        kinds = {**tables, "dtype": "constexpr", "p": "constexpr"}
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
        source = ASTSource(exact_programs.sum_pieces, kinds, {(3,): dtype, (4,): p}, aligned)
        options = {"num_warps": exact_triton._WARPS}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        text = compiled.asm["ptx"]
        assert ".ftz" not in text  # subnormal numbers count
        assert text.count("sub.f64") == 32, text.count("sub.f64")  # two steps for each of 16
        assert not re.search(r"\batom\b|\bred\b|bar\.sync", text)
"""


@pytest.mark.processes
def test_it_compiles_for_a_gpu_that_is_not_here(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
