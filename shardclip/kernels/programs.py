"""What runs on the device, in Triton: a program for each block of each tensor of a list.

The tensors are found through a table of their addresses, so that one launch takes them all,
whatever their sizes, dtypes and alignments. ``fused`` makes the tables and launches.
"""

import triton
import triton.language as tl

# A block is read in tiles, a tile in rows, so that a thread holds whole columns. A block's column
# is added in the tensor's own precision, at the cost of at most ROWS + 4 roundings; float64 takes
# over from there. A block is so long that looking up where it lies takes little of its time.
ROWS = tl.constexpr(4)
COLUMNS = tl.constexpr(1024)
TILE = tl.constexpr(4 * 1024)
BLOCK = tl.constexpr(4 * 4 * 1024)
WARPS = 4  # a thread takes 16 bytes of each row at once, of float32 twice
ALIGNMENT = tl.constexpr(16)

BFLOAT16 = tl.constexpr(0)
FLOAT16 = tl.constexpr(1)
FLOAT32 = tl.constexpr(2)
FLOAT64 = tl.constexpr(3)

INFINITY = tl.constexpr(float("inf"))
# float32 squares lose at most 2^-126 each: in a block's sum above this, nothing that counts.
FAINT = tl.constexpr(1e-25)
# Below this a coefficient is no normal float32 any more, and is applied in two steps.
TINY = tl.constexpr(2.0**-100)
HUGE = tl.constexpr(2.0**100)


@triton.jit
def sum_blocks(addresses, tensors, blocks, totals, bad, dtype: tl.constexpr, p: tl.constexpr):
    """Write each block's sum of |x|^p (p = inf: maximum of |x|) and how many are not finite.

    Args:
        addresses: int64, of each tensor.
        tensors: int64 (tensors, 3): its number of elements, its kind, an element's bytes.
        blocks: int64 (blocks, 2): the block's tensor, and where in it the block starts.
        totals: float64 (blocks,), written.
        bad: float64 (blocks,), written.
        dtype: Of all tensors, if they have the same: less code, fewer registers. Else None.
        p: 0, 1, 2 or inf.
    """
    block = tl.program_id(0)
    address, low, high, kind = _find(block, addresses, tensors, blocks)
    # Each dtype has its own code down to a number: tiles of different layouts are costly to join.
    if dtype is not None:
        total, count = _measure(address, low, high, dtype, p)
    elif kind == BFLOAT16:
        total, count = _measure(address, low, high, tl.bfloat16, p)
    elif kind == FLOAT16:
        total, count = _measure(address, low, high, tl.float16, p)
    elif kind == FLOAT32:
        total, count = _measure(address, low, high, tl.float32, p)
    else:
        total, count = _measure(address, low, high, tl.float64, p)
    tl.store(totals + block, total)
    tl.store(bad + block, count)


@triton.jit
def combine(ranges, totals, bad, total, count, p: tl.constexpr):
    """Combine ranges of blocks, always in the same order.

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
    counts = tl.zeros([COLUMNS], tl.float64)
    for first in range(start, stop, COLUMNS):
        block = first + tl.arange(0, COLUMNS)
        sums = _merge(sums, tl.load(totals + block, mask=block < stop, other=0), p)
        counts += tl.load(bad + block, mask=block < stop, other=0)
    tl.store(total + this, _reduce(sums, p))
    tl.store(count + this, tl.sum(counts, 0))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["coef"])
def multiply_blocks(addresses, tensors, blocks, count, coef, dtype: tl.constexpr):
    """Multiply every block in place; a coefficient of one is read, and nothing else.

    The product is taken in float32 (float64 for float64) and rounded to the tensor's dtype. A few
    programs share the blocks, so that finding a one is as quick as a launch.

    Args:
        addresses: As in ``sum_blocks``, and the next two.
        tensors: See there.
        blocks: See there.
        count: How many blocks there are.
        coef: float64, one number.
        dtype: As in ``sum_blocks``.
    """
    factor = tl.load(coef)
    if factor != 1:
        for block in range(tl.program_id(0), count, tl.num_programs(0)):
            address, low, high, kind = _find(block, addresses, tensors, blocks)
            if dtype is not None:
                _multiply(address, low, high, factor, dtype)
            elif kind == BFLOAT16:
                _multiply(address, low, high, factor, tl.bfloat16)
            elif kind == FLOAT16:
                _multiply(address, low, high, factor, tl.float16)
            elif kind == FLOAT32:
                _multiply(address, low, high, factor, tl.float32)
            else:
                _multiply(address, low, high, factor, tl.float64)


@triton.jit
def _find(block, addresses, tensors, blocks):
    """Return a block's aligned address, which of its elements are the tensor's, and their kind.

    Blocks begin at aligned addresses; where the tensor itself does not, its first block begins
    before it.
    """
    tensor = tl.load(blocks + 2 * block)
    start = tl.load(blocks + 2 * block + 1)
    address = tl.load(addresses + tensor)
    numel = tl.load(tensors + 3 * tensor)
    kind = tl.load(tensors + 3 * tensor + 1)
    size = tl.load(tensors + 3 * tensor + 2)
    low = address % ALIGNMENT // size - start
    high = tl.minimum(low + numel, BLOCK).to(tl.int32)
    return address - low * size, tl.maximum(low, 0).to(tl.int32), high, kind


@triton.jit
def _measure(address, low, high, dtype: tl.constexpr, p: tl.constexpr):
    """Return a block's total, and how many of its elements are not finite.

    Where the total says that float32 could not hold it, or that something is not finite, all is
    done again in float64. For p = 0 it says neither.
    """
    floor: tl.constexpr = INFINITY if p == 0 else FAINT
    own: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    total = _total(address, low, high, dtype, own, p)
    count = 0.0
    if not ((total > floor) & (total < INFINITY)):
        total = _total(address, low, high, dtype, tl.float64, p)
        count = _nonfinite(address, low, high, dtype)
    return total, count


@triton.jit
def _total(address, low, high, dtype: tl.constexpr, precision: tl.constexpr, p: tl.constexpr):
    sums = tl.zeros([COLUMNS], precision)
    for first in range(0, high, TILE):
        x = _read(address, first, low, high, dtype).to(precision)
        sums = _merge(sums, _power(x, p), p)
    return _reduce(sums.to(tl.float64), p)


@triton.jit
def _nonfinite(address, low, high, dtype: tl.constexpr):
    counts = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, high, TILE):
        x = _read(address, first, low, high, dtype)
        counts += tl.sum(tl.where(tl.abs(x) < INFINITY, 0.0, 1.0), 0)
    return tl.sum(counts, 0)


@triton.jit
def _power(x, p: tl.constexpr):
    """Sum |x|^p over a tile's rows, or find the largest |x|, in the tile's precision."""
    if p == INFINITY:
        few = tl.max(_rank(x), 0).to(x.dtype, bitcast=True)
    elif p == 2:
        few = tl.sum(x * x, 0)
    elif p == 1:
        few = tl.sum(tl.abs(x), 0)
    else:
        few = tl.sum(tl.where(x == x, (x != 0).to(x.dtype), x), 0)
    return few


@triton.jit
def _merge(a, b, p: tl.constexpr):
    """Add, or take the larger one, where NaN is larger than all."""
    if p == INFINITY:
        merged = tl.maximum(_rank(a), _rank(b)).to(a.dtype, bitcast=True)
    else:
        merged = a + b
    return merged


@triton.jit
def _reduce(sums, p: tl.constexpr):
    """Merge all of a vector."""
    if p == INFINITY:
        reduced = tl.max(_rank(sums), 0).to(tl.float64, bitcast=True)
    else:
        reduced = tl.sum(sums, 0)
    return reduced


@triton.jit
def _rank(x):
    """Return |x| as an integer: in the same order, with NaN above infinity."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    return bits


@triton.jit
def _multiply(address, low, high, factor, dtype: tl.constexpr):
    tiny = tl.abs(factor) < TINY
    large = tl.where(tiny, factor * HUGE, factor).to(tl.float32)
    small = tl.where(tiny, TINY, 1.0).to(tl.float32)
    for first in range(0, high, TILE):
        x = _read(address, first, low, high, dtype)
        x = x * factor if dtype == tl.float64 else x * large * small
        _write(address, first, low, high, x, dtype)


@triton.jit
def _offsets():
    return tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _load(address, first, low, high, dtype: tl.constexpr):
    """Load a tile, 0 where the tensor is not; a mask would forbid loading in long pieces."""
    pointers = tl.multiple_of(address.to(tl.pointer_type(dtype)), ALIGNMENT) + first + _offsets()
    if (first >= low) & (first + TILE <= high):
        x = tl.load(pointers)
    else:
        here = first + _offsets()
        x = tl.load(pointers, mask=(here >= low) & (here < high), other=0)
    return x


@triton.jit
def _store(address, first, low, high, x):
    pointers = tl.multiple_of(address.to(tl.pointer_type(x.dtype)), ALIGNMENT) + first + _offsets()
    if (first >= low) & (first + TILE <= high):
        tl.store(pointers, x)
    else:
        here = first + _offsets()
        tl.store(pointers, x, mask=(here >= low) & (here < high))


@triton.jit
def _read(address, first, low, high, dtype: tl.constexpr):
    """Load a tile as float32, or float64; a bfloat16 is the upper half of a float32."""
    if dtype == tl.bfloat16:
        bits = _load(address, first, low, high, tl.int16).to(tl.int32) << 16
        x = bits.to(tl.float32, bitcast=True)
    elif dtype == tl.float16:
        x = _load(address, first, low, high, dtype).to(tl.float32)
    else:
        x = _load(address, first, low, high, dtype)
    return x


@triton.jit
def _write(address, first, low, high, x, dtype: tl.constexpr):
    """Round a tile to its dtype, to nearest even, and store it."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        _store(address, first, low, high, tl.where(x == x, bits, 0x7FC0).to(tl.int16))
    else:
        _store(address, first, low, high, x.to(dtype))
