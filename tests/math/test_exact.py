"""Exact sums against fractions: any dtype, any bits, any split."""

import math
import random
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from shardclip.kernels import exact as kernel
from shardclip.math import exact, windows
from shardclip.math.windows import DOUBLE, NUMBER, SINGLE

BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
DTYPES = pytest.mark.parametrize("dtype", list(BITS), ids=str)
POWERS = pytest.mark.parametrize("p", [1, 2])
WINDOWS = pytest.mark.parametrize("window", [SINGLE, DOUBLE, NUMBER], ids=str)


def lanes_of(tensors, p, window=None):
    window = window or windows.window([tensor.dtype for tensor in tensors])
    return kernel.ExactSums(tensors, [0] * len(tensors), 1, window)(tensors, p)


def value(lanes, window):
    """What the digits say, as a fraction."""
    units = sum(digit << (32 * k) for k, digit in enumerate(lanes.tolist()[: window.digits]))
    return units * Fraction(2) ** window.low


def power_sum(tensor, p):
    units, point = 0, 1074 if tensor.dtype == torch.float64 else 149
    for number in tensor.double().flatten().tolist():
        if math.isfinite(number):
            numerator, denominator = abs(number).as_integer_ratio()
            units += (numerator << (point + 1 - denominator.bit_length())) ** p
    return Fraction(units, 1 << point * p)


def nearest_root(square):
    """The float64 nearest to the root of a dyadic fraction, ties to even."""
    exponent = square.denominator.bit_length() - 1
    shift = 2400 + exponent % 2
    number = square.numerator << shift
    found = math.isqrt(number)
    # What is cut off lies far below half a bit of float64: a one after the point stands for it.
    return as_float(Fraction(2 * found + (found * found != number), 2 << (exponent + shift) // 2))


def as_float(number):
    try:
        return float(number)
    except OverflowError:
        return -math.inf if number < 0 else math.inf


def assert_exact(tensor, p, window=None):
    window = window or windows.window([tensor.dtype])
    lanes = lanes_of([tensor], p, window)[0]
    assert int(lanes[: window.digits].max()) < 2**32
    assert int(lanes.min()) >= 0
    assert value(lanes, window) == power_sum(tensor, p)
    nans, bad = int(tensor.isnan().sum()), int((~tensor.isfinite()).sum())
    assert lanes[window.digits :].tolist() == [bad, nans]


def raw(dtype, size, seed):
    """Any bits, NaN and infinities among them."""
    info = torch.iinfo(BITS[dtype])
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(info.min, info.max, (size,), dtype=BITS[dtype], generator=generator)
    return bits.view(dtype)


def wide(dtype, size, seed):
    """Magnitudes over the whole range, subnormals and zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    low, high = math.log2(info.smallest_normal) - 60, math.log2(info.max)
    exponents = torch.rand(size, generator=generator, dtype=torch.float64) * (high - low) + low
    sign = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    return (sign * torch.exp2(exponents)).to(dtype)


@POWERS
@DTYPES
@pytest.mark.parametrize("make", [raw, wide], ids=["raw", "wide"])
@pytest.mark.parametrize("size", [1, 2, 3, 63, 1000, 4095, 4096, 8192, 9001])
def test_any_bits(dtype, p, make, size):
    assert_exact(make(dtype, size, size), p)


@POWERS
@DTYPES
def test_gradients_with_and_without_zeros(dtype, p):
    tensor = (torch.randn(50_000) * 1e-3).to(dtype)
    assert_exact(tensor, p)
    tensor[torch.rand(50_000) < 0.5] = 0
    tensor[torch.rand(50_000) < 0.1] = -0.0
    assert_exact(tensor, p)


@POWERS
@DTYPES
def test_the_ends_of_the_range(dtype, p):
    info = torch.finfo(dtype)
    tiny = torch.tensor([1], dtype=BITS[dtype]).view(dtype)
    for size in (1, 4096, 8191):
        assert_exact(torch.full((size,), info.max, dtype=dtype), p)
        assert_exact(tiny.repeat(size), p)
        assert_exact(torch.cat([tiny.repeat(size), -torch.full((1,), info.max, dtype=dtype)]), p)
        assert_exact(torch.zeros(size, dtype=dtype), p)


@POWERS
@DTYPES
@pytest.mark.parametrize("block", [1, 7, 4096, 8192])
def test_the_block_size_does_not_matter(dtype, p, block, monkeypatch):
    tensor = torch.cat([wide(dtype, 9000, 1), torch.randn(9000).to(dtype)])[: max(200, 3 * block)]
    monkeypatch.setattr(kernel, "_COUNTED", 1 << 62)
    monkeypatch.setattr(kernel, "_BLOCK", block)
    assert_exact(tensor, p)


@POWERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_counting_codes_gives_the_same_lanes(dtype, p, monkeypatch):
    tensor = raw(dtype, 100_000, 3)
    assert_exact(tensor, p)
    counted = lanes_of([tensor], p)
    monkeypatch.setattr(kernel, "_COUNTED", 1 << 62)
    assert torch.equal(lanes_of([tensor], p), counted)
    monkeypatch.setattr(kernel, "_COUNTED", 1)
    assert torch.equal(lanes_of([tensor], p), counted)


@POWERS
@DTYPES
@pytest.mark.parametrize("parts", range(1, 8))
def test_any_split_and_order(dtype, p, parts):
    tensor = torch.cat([torch.randn(6000).to(dtype) * 1e-2, wide(dtype, 500, parts)])
    window = windows.window([dtype])
    whole = lanes_of([tensor], p)
    generator = torch.Generator().manual_seed(parts)
    shuffled = tensor[torch.randperm(len(tensor), generator=generator)]
    ends = torch.randint(0, len(tensor), (parts - 1,), generator=generator).sort().values.tolist()
    pieces = [shuffled[a:b] for a, b in zip([0, *ends], [*ends, len(tensor)], strict=True)]
    assert torch.equal(lanes_of([shuffled], p), whole)
    assert torch.equal(lanes_of(pieces, p), whole)
    ranks = torch.stack([lanes_of([piece], p)[0] for piece in pieces]).sum(0)
    assert value(ranks, window) == value(whole[0], window)
    norm = exact.finish(whole[0], p, window)
    assert torch.equal(exact.finish(ranks, p, window), norm)
    reference = power_sum(tensor, p)
    assert float(norm) == (nearest_root(reference) if p == 2 else as_float(reference))


@POWERS
@DTYPES
def test_the_number_of_threads_does_not_matter(dtype, p):
    tensor = torch.cat([torch.randn(140_000).to(dtype), wide(dtype, 5000, 5)])
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(lanes_of([tensor], p))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@POWERS
@DTYPES
@pytest.mark.parametrize("size", [100, 40_000])
def test_subnormals_count_even_where_the_processor_flushes_them(dtype, p, size):
    info = torch.iinfo(BITS[dtype])
    fraction = kernel.KINDS[dtype].fraction
    bits = torch.arange(size, dtype=torch.int64) % (1 << fraction)
    tensor = torch.where(torch.arange(size) % 2 == 0, bits, bits + info.min).to(BITS[dtype])
    tensor = tensor.view(dtype)
    whole = lanes_of([tensor], p)
    expected = power_sum(tensor, p)
    assert value(whole[0], windows.window([dtype])) == expected > 0
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flushed = lanes_of([tensor], p)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed, whole)


@POWERS
def test_buckets_and_shapes(p):
    base = torch.randn(60, 50)
    tensors = [
        base.t(),
        base[::2, 5:],
        base[:1].expand(40, 50),
        base[0, 0],
        base[1, 1],
        torch.empty(0, 7),
        base.bfloat16(),
        base.double(),
        base.reshape(6, 10, 50).permute(2, 0, 1),
    ]
    buckets = [0, 2, 2, 3, 3, 0, 0, 3, 2]
    found = kernel.ExactSums(tensors, buckets, 5, DOUBLE)(tensors, p)
    assert found.shape == (5, DOUBLE.lanes)
    for bucket in range(5):
        held = [t for t, b in zip(tensors, buckets, strict=True) if b == bucket]
        assert value(found[bucket], DOUBLE) == sum(power_sum(t, p) for t in held)


def test_many_small_tensors_are_packed_right():
    tensors = [torch.randn(n % 7 + 1, 5) for n in range(500)]
    buckets = [n % 3 for n in range(500)]
    found = kernel.ExactSums(tensors, buckets, 3, SINGLE)(tensors, 2)
    for bucket in range(3):
        expected = sum(power_sum(t, 2) for t in tensors[bucket::3])
        assert value(found[bucket], SINGLE) == expected
    assert kernel.ExactSums([], [], 2, SINGLE)([], 2).tolist() == [[0] * 22] * 2


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_squares(dtype):
    tensor = torch.randn(300, dtype=dtype)
    expected = power_sum(torch.view_as_real(tensor), 2)
    for seen in (tensor, tensor.conj(), tensor.reshape(20, 15).t()):
        assert value(lanes_of([seen], 2)[0], windows.window([dtype])) == expected


def test_gradients_that_need_a_graph_are_read_without_one():
    tensor = torch.randn(10, requires_grad=True)
    assert not lanes_of([tensor], 2).requires_grad


@pytest.mark.parametrize(
    "dtype, p, message",
    [
        (torch.float32, 3, "norm_type 1 or 2, got 3"),
        (torch.float32, math.inf, "norm_type 1 or 2, got inf"),
        (torch.complex64, 1, "irrational"),
        (torch.int32, 2, "cast it to float32"),
        (torch.float8_e5m2, 2, "cast it to float32"),
    ],
)
def test_what_cannot_be_exact_is_rejected(dtype, p, message):
    with pytest.raises(ValueError, match=message):
        kernel.check(dtype, p)
    with pytest.raises(ValueError, match=message):
        lanes_of([torch.ones(4).to(dtype)], p)


def test_a_window_that_is_too_narrow_is_rejected():
    tensors = [torch.ones(3), torch.ones(3, dtype=torch.float64)]
    with pytest.raises(ValueError, match="wider window"):
        kernel.ExactSums(tensors, [0, 0], 1, SINGLE)


def test_capacity():
    windows.check_capacity(2**63 - 1, 2**20)
    with pytest.raises(ValueError, match="2\\^63 elements, got 9223372036854775808"):
        windows.check_capacity(2**63, 1)
    with pytest.raises(ValueError, match="2\\^20 ranks, got 1048577"):
        windows.check_capacity(1, 2**20 + 1)


@WINDOWS
def test_lanes_at_capacity(window):
    """The largest digits of the most ranks: nothing overflows, up to the top digit."""
    top = (1 << (window.top - window.low - 1)) - 1
    share = exact.pack([top // windows.MAX_RANKS], [0], [0], window)[0]
    total = share * windows.MAX_RANKS
    assert int(total.min()) >= 0
    expected = value(share, window) * windows.MAX_RANKS
    assert value(total, window) == expected
    assert value(exact.carry(total), window) == expected
    for p, wanted in ((1, as_float(expected)), (2, nearest_root(expected))):
        found = exact.finish(total.expand(20, -1), p, window).tolist()
        assert found == [float(exact.finish(total, p, window))] * 20 == [wanted] * 20


@WINDOWS
@pytest.mark.parametrize("size", [1 << 33, 1 << 52])
def test_digits_of_any_size_and_sign(window, size):
    generator = torch.Generator().manual_seed(size)
    lanes = torch.randint(-size, size, (400, window.lanes), generator=generator)
    lanes[:200] = lanes[:200].sign() * (size - 1)  # carries all the way
    lanes[:, -2:] = 0
    for row, length in enumerate(torch.randint(1, window.digits, (400,), generator=generator)):
        lanes[row, length : window.digits] = 0
        lanes[row, length - 1] = lanes[row, length - 1].abs() + 1
    expected = [value(row, window) for row in lanes]
    small = exact.carry(lanes)
    assert [value(row, window) for row in small] == expected
    assert int(small.abs().max()) <= 2**31 + 1
    assert exact.root(lanes, window).tolist() == [nearest_root(number) for number in expected]
    assert [float(exact.finish(row, 2, window)) for row in lanes] == [
        nearest_root(number) for number in expected
    ]
    found = zip(exact.decode(lanes, window).tolist(), expected, strict=True)
    assert all(a == as_float(b) or b % Fraction(2) ** -1074 for a, b in found)


@pytest.mark.parametrize("window", [SINGLE, DOUBLE], ids=str)
def test_windows_hold_what_they_promise(window):
    largest = torch.finfo(torch.float64 if window is DOUBLE else torch.float32).max
    assert Fraction(largest) ** 2 * windows.MAX_ELEMENTS <= Fraction(2) ** (window.top - 1)
    smallest = Fraction(2) ** (-1074 if window is DOUBLE else -149)
    assert smallest**2 >= Fraction(2) ** window.low


def integers(window):
    """Sums that are hard to round: squares and their neighbours, long runs of ones and zeros."""
    rng = random.Random(7)
    length = window.top - window.low - 1
    for _ in range(3000):
        number = rng.getrandbits(rng.randint(1, length))
        kind = rng.random()
        if kind < 0.5:  # of 54 bits: half-way between two float64
            half = rng.getrandbits(rng.choice([1, 20, 53, 54, 54, 54])) | 1
            number = half * half << 2 * rng.randint(0, (length - 108) // 2)
            number += rng.choice([0, 0, 1, -1, 1 << rng.randint(0, 60), -(1 << rng.randint(0, 60))])
        elif kind < 0.6:
            number = (1 << rng.randint(0, length - 1)) + rng.choice([0, 1, -1])
        elif kind < 0.8:
            number = (rng.getrandbits(54) | 1) << rng.randint(0, length - 54)
            number += rng.choice([0, 1, -1])
        yield max(number, 0) % (1 << length)


@WINDOWS
def test_rounding_once(window):
    sums = list(integers(window))
    lanes = exact.pack(sums, [0] * len(sums), [0] * len(sums), window)
    fractions = [units * Fraction(2) ** window.low for units in sums]
    expected = [as_float(number) for number in fractions]
    roots = [nearest_root(number) for number in fractions]
    assert exact.root(lanes, window).tolist() == roots
    assert exact.finish(lanes, 2, window).tolist() == roots
    assert [float(exact.finish(row, 2, window)) for row in lanes[:1500]] == roots[:1500]
    assert [float(exact.finish(row, 1, window)) for row in lanes[:1500]] == expected[:1500]
    # Below float64's normal range only multiples of its smallest number occur as sums.
    small = torch.finfo(torch.float64).smallest_normal
    step = Fraction(2) ** -1074
    for found, wanted, number in zip(
        exact.decode(lanes, window).tolist(), expected, fractions, strict=True
    ):
        assert found == wanted or (wanted <= small and number % step)


def test_a_real_tie():
    tie = torch.tensor([2.0**53, 2.0**27, 1.0])
    assert float(exact.finish(lanes_of([tie], 2)[0], 2, SINGLE)) == 2.0**53
    more = torch.cat([tie, torch.tensor([2.0**-149])])
    for rows in (1, 17):
        lanes = lanes_of([more], 2).expand(rows, -1)
        assert exact.finish(lanes, 2, SINGLE).tolist() == [2.0**53 + 2] * rows


# The last sum is k^4 + k^2, whose root lies just below k^2 + 1/2: to 53 bits it is a tie.
@pytest.mark.parametrize("bits", [(1, 1, 1), (3, 3, 1), (1 << 50, 1 << 50, 1), (32769**2, 32769)])
def test_a_subnormal_norm_is_rounded_once(bits):
    tensor = torch.tensor(bits, dtype=torch.int64).view(torch.float64)
    lanes = lanes_of([tensor], 2)
    expected = nearest_root(power_sum(tensor, 2))
    assert exact.finish(lanes, 2, DOUBLE).tolist() == [expected]
    assert exact.root(lanes, DOUBLE).tolist() == [expected]


@POWERS
@DTYPES
@pytest.mark.parametrize("rows", [1, 20])
def test_infinities_and_nan(dtype, p, rows):
    window = windows.window([dtype])
    cases = {
        (1.0, math.inf): math.inf,
        (-math.inf, 1.0): math.inf,
        (math.inf, -math.inf): math.inf,
        (math.nan, 1.0): math.nan,
        (math.nan, math.inf): math.nan,
    }
    for numbers, expected in cases.items():
        tensor = torch.tensor(numbers, dtype=dtype)
        for seen in (tensor, tensor.repeat(20_000)):
            lanes = lanes_of([seen], p)
            assert value(lanes[0], window) == power_sum(seen, p)
            found = exact.finish(lanes.expand(rows, -1), p, window).tolist()
            assert found == pytest.approx([expected] * rows, nan_ok=True)


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(FINITE, min_size=3, max_size=3), min_size=1, max_size=30))
def test_numbers_of_many_ranks_are_added_and_rounded_once(ranks):
    values = torch.tensor(ranks, dtype=torch.float64)
    lanes = exact.encode(values)
    assert torch.equal(exact.decode(lanes), values)
    total = exact.decode(lanes.sum(0)).tolist()
    for found, column in zip(total, values.T.tolist(), strict=True):
        assert found == as_float(sum(map(Fraction, column)))
    cancelled = exact.encode(torch.cat([values, -values])).sum(0)
    assert exact.decode(cancelled).tolist() == [0.0] * 3


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(FINITE, min_size=1, max_size=60), st.sampled_from([1, 2]))
def test_any_float64_numbers(numbers, p):
    assert_exact(torch.tensor(numbers, dtype=torch.float64), p)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.floats(width=32), min_size=1, max_size=60), st.sampled_from([1, 2]))
def test_any_float32_numbers(numbers, p):
    assert_exact(torch.tensor(numbers, dtype=torch.float32), p)
    assert_exact(torch.tensor(numbers, dtype=torch.float32), p, DOUBLE)


@pytest.mark.parametrize("window", [SINGLE, NUMBER], ids=str)
def test_numbers_that_are_not_finite(window):
    values = torch.tensor([[math.inf, -math.inf, math.inf, math.nan], [1.0, 2.0, -math.inf, 3.0]])
    found = exact.decode(exact.encode(values.double(), window).sum(0), window).tolist()
    assert found == pytest.approx([math.inf, -math.inf, math.nan, math.nan], nan_ok=True)


def test_a_narrow_window_drops_what_is_below_and_flags_what_is_above():
    values = torch.tensor(
        [2.0**-321, 2.0**-320 * 1.5, -(2.0**299) + 2.0**246, 2.0**299, -(2.0**300)],
        dtype=torch.float64,
    )
    found = exact.decode(exact.encode(values, SINGLE), SINGLE).tolist()
    assert found == [0.0, 2.0**-320, -(2.0**299) + 2.0**246, math.inf, -math.inf]
    many = exact.encode(values[2], SINGLE) * windows.MAX_RANKS
    assert float(exact.decode(many, SINGLE)) == float(values[2]) * 2.0**20


def test_a_proof_of_copies_cancels():
    """Coefficients that sum to zero up to rounding leave rounding, and nothing else."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.rand(1000, 1, generator=generator, dtype=torch.float64) - 0.5
    factors -= factors.mean(0)
    sketch = torch.randn(50, generator=generator, dtype=torch.float64) * 1e-4
    lanes = exact.encode(factors * sketch, SINGLE).sum(0)
    left = exact.decode(lanes, SINGLE).abs()
    assert bool((left <= 1e-15 * sketch.abs() * 1000**0.5).all())
    halves = torch.tensor([0.5, -0.5], dtype=torch.float64).unsqueeze(1)
    assert int(exact.encode(halves * sketch, SINGLE).sum(0).abs().max()) == 0


def test_shapes_and_empty():
    for shape in ((), (0,), (2, 0), (2, 3)):
        values = torch.ones(shape, dtype=torch.float64)
        lanes = exact.encode(values)
        assert lanes.shape == (*shape, NUMBER.lanes)
        assert torch.equal(exact.decode(lanes), values)
        assert torch.equal(exact.root(lanes, NUMBER), values)
        assert torch.equal(exact.finish(lanes, 2, NUMBER), values)
    scattered = torch.randn(6, 4, dtype=torch.float64)[::2, 1:].t()
    assert torch.equal(exact.decode(exact.encode(scattered)), scattered)


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(default):
    tensor = torch.cat([torch.randn(40_000), torch.tensor([1e-40])])
    halves = tensor.bfloat16()
    expected = lanes_of([tensor], 2), lanes_of([halves], 2)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = lanes_of([tensor], 2), lanes_of([halves], 2)
        norms = [exact.finish(lanes.expand(n, -1), 2, SINGLE) for lanes in found for n in (1, 20)]
        numbers = exact.decode(exact.encode(norms[0]))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert {norm.dtype for norm in norms} == {torch.float64}
    assert len({float(norm[0]) for norm in norms[:2]}) == 1
    assert torch.equal(numbers, norms[0])
