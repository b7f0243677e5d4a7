"""What runs on the device, in Triton: a program for each block of each tensor of a list.

The tensors are found through a table of their addresses, so that one launch takes them all,
whatever their sizes, dtypes and alignments. ``fused`` makes the tables and launches.
"""

import triton
import triton.language as tl

# A block is read as rows, so that a thread holds whole columns: ROWS numbers are added in their
# own precision, which costs at most ROWS roundings, and float64 takes over from there.
ROWS: tl.constexpr = tl.constexpr(8)
COLUMNS: tl.constexpr = tl.constexpr(1024)
BLOCK: tl.constexpr = tl.constexpr(8 * 1024)
ALIGNMENT: tl.constexpr = tl.constexpr(16)  # bytes: the longest piece that a thread loads at once

BFLOAT16: tl.constexpr = tl.constexpr(0)
FLOAT16: tl.constexpr = tl.constexpr(1)
FLOAT32: tl.constexpr = tl.constexpr(2)
FLOAT64: tl.constexpr = tl.constexpr(3)

INFINITY: tl.constexpr = tl.constexpr(float("inf"))
# float32 squares lose at most 2^-126 each: in a block's sum above this, nothing that counts.
FAINT: tl.constexpr = tl.constexpr(1e-25)
# Below this a coefficient is no normal float32 any more, and is applied in two steps.
TINY: tl.constexpr = tl.constexpr(2.0**-100)
HUGE: tl.constexpr = tl.constexpr(2.0**100)


@triton.jit
def sum_blocks(addresses, tensors, blocks, totals, bad, p: tl.constexpr):
    """Write each block's sum of |x|^p (p = inf: maximum of |x|) and how many are not finite.

    Args:
        addresses: int64, of each tensor.
        tensors: int64 (tensors, 3): its number of elements, its kind, an element's bytes.
        blocks: int64 (blocks, 2): the block's tensor, and where in it the block starts.
        totals: float64 (blocks,), written.
        bad: float64 (blocks,), written.
        p: 0, 1, 2 or inf.
    """
    block = tl.program_id(0)
    address, low, high, kind = _find(block, addresses, tensors, blocks)
    if kind == FLOAT64:
        total, count = _measure(_read(address, low, high, tl.float64), p)
    else:
        total, count = _measure(_read_single(address, low, high, kind), p)
    tl.store(totals + block, total)
    tl.store(bad + block, count.to(tl.float64))


@triton.jit
def combine(ranges, totals, bad, total, count, p: tl.constexpr):
    """Combine a range of blocks, always in the same order.

    Args:
        ranges: int64 (ranges, 2): where each starts and stops.
        totals: What ``sum_blocks`` wrote, as ``bad``.
        bad: See there.
        total: float64 (ranges,), written.
        count: float64 (ranges,), written.
        p: As there.
    """
    this = tl.program_id(0)
    start = tl.load(ranges + 2 * this)
    stop = tl.load(ranges + 2 * this + 1)
    sums = tl.zeros([COLUMNS], tl.float64)
    largest = tl.zeros([COLUMNS], tl.int64)
    counts = tl.zeros([COLUMNS], tl.float64)
    for first in range(start, stop, COLUMNS):
        block = first + tl.arange(0, COLUMNS)
        value = tl.load(totals + block, mask=block < stop, other=0.0)
        if p == INFINITY:
            largest = tl.maximum(largest, _rank(value))
        else:
            sums += value
        counts += tl.load(bad + block, mask=block < stop, other=0.0)
    if p == INFINITY:
        tl.store(total + this, tl.max(largest, 0).to(tl.float64, bitcast=True))
    else:
        tl.store(total + this, tl.sum(sums, 0))
    tl.store(count + this, tl.sum(counts, 0))


@triton.jit(do_not_specialize=["count"])
def multiply_blocks(addresses, tensors, blocks, count, coef):
    """Multiply every block in place; a coefficient of one is read, and nothing else.

    The product is taken in float32 (float64 for float64) and rounded to the tensor's dtype. A few
    programs share the blocks, so that finding a one is as quick as a launch.

    Args:
        addresses: As in ``sum_blocks``, and the next two.
        tensors: See there.
        blocks: See there.
        count: How many blocks there are.
        coef: float64, one number.
    """
    factor = tl.load(coef)
    if factor != 1:
        tiny = tl.abs(factor) < TINY
        first = tl.where(tiny, factor * HUGE, factor).to(tl.float32)
        second = tl.where(tiny, TINY, 1.0).to(tl.float32)
        for block in range(tl.program_id(0), count, tl.num_programs(0)):
            address, low, high, kind = _find(block, addresses, tensors, blocks)
            if kind == FLOAT64:
                _write(address, low, high, _read(address, low, high, tl.float64) * factor)
            else:
                x = _read_single(address, low, high, kind) * first * second
                _write_single(address, low, high, kind, x)


@triton.jit
def _find(block, addresses, tensors, blocks):
    """Return a block's aligned address, which of its elements are the tensor's, and their kind.

    Blocks begin at aligned addresses; where the tensor itself does not, its first block begins
    before it, and the last one is longer by as much.
    """
    tensor = tl.load(blocks + 2 * block)
    start = tl.load(blocks + 2 * block + 1)
    address = tl.load(addresses + tensor)
    numel = tl.load(tensors + 3 * tensor)
    kind = tl.load(tensors + 3 * tensor + 1)
    size = tl.load(tensors + 3 * tensor + 2)
    ahead = address % ALIGNMENT // size
    low = ahead - start
    return address - low * size, low, low + numel, kind


@triton.jit
def _offsets():
    return tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _read(address, low, high, dtype: tl.constexpr):
    """Load a block, 0 where the tensor is not; a mask would forbid loading in long pieces."""
    pointers = tl.multiple_of(address, ALIGNMENT).to(tl.pointer_type(dtype)) + _offsets()
    if (low <= 0) & (high >= BLOCK):
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(_offsets() >= low) & (_offsets() < high), other=0)
    return x


@triton.jit
def _write(address, low, high, x):
    pointers = tl.multiple_of(address, ALIGNMENT).to(tl.pointer_type(x.dtype)) + _offsets()
    if (low <= 0) & (high >= BLOCK):
        tl.store(pointers, x)
    else:
        tl.store(pointers, x, mask=(_offsets() >= low) & (_offsets() < high))


@triton.jit
def _read_single(address, low, high, kind):
    """Load a block as float32; bfloat16 as the upper half of one, which is exact everywhere."""
    if kind == BFLOAT16:
        bits = _read(address, low, high, tl.int16).to(tl.int32) << 16
        x = bits.to(tl.float32, bitcast=True)
    elif kind == FLOAT16:
        x = _read(address, low, high, tl.float16).to(tl.float32)
    else:
        x = _read(address, low, high, tl.float32)
    return x


@triton.jit
def _write_single(address, low, high, kind, x):
    """Round a block to its dtype, to nearest even, and store it."""
    if kind == BFLOAT16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        _write(address, low, high, tl.where(x == x, bits, 0x7FC0).to(tl.int16))
    elif kind == FLOAT16:
        _write(address, low, high, x.to(tl.float16))
    else:
        _write(address, low, high, x)


@triton.jit
def _measure(x, p: tl.constexpr):
    """Return a block's total, and how many of its elements are not finite.

    Where the total says that float32 could not hold it, or that something is not finite, all is
    done again in float64. For p = 0 it says neither.
    """
    floor: tl.constexpr = INFINITY if p == 0 else FAINT
    total = _total(x, p)
    count = 0
    if not ((total > floor) & (total < INFINITY)):
        wide = x.to(tl.float64)
        total = _total(wide, p)
        count = tl.sum(tl.sum(tl.where(tl.abs(wide) < INFINITY, 0, 1), 0), 0)
    return total, count


@triton.jit
def _total(x, p: tl.constexpr):
    if p == INFINITY:
        ranks = tl.max(tl.max(_rank(x), 0), 0)
        return ranks.to(x.dtype, bitcast=True).to(tl.float64)
    if p == 2:
        powers = x * x
    elif p == 1:
        powers = tl.abs(x)
    else:
        powers = tl.where(x == x, (x != 0).to(x.dtype), x)
    return tl.sum(tl.sum(powers, 0).to(tl.float64), 0)


@triton.jit
def _rank(x):
    """Return |x| as an integer: in the same order, with NaN above infinity."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    return bits
