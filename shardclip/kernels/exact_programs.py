"""What runs on the device, in Triton, for exact sums; ``exact_triton`` launches it.

A tile stays in registers while ``exact._sum_units`` is done to it.
"""

import triton
import triton.language as tl

from shardclip.math import windows

LANES = tl.constexpr(32)  # of a program: those of ``windows.SINGLE``, and some unused
LOW = tl.constexpr(windows.SINGLE.low)
DIGITS = tl.constexpr(windows.SINGLE.digits)
DIGIT = tl.constexpr((1 << windows.BITS) - 1)
TILE = tl.constexpr(512)
WIDTH = tl.constexpr(50)  # bits of a unit's sum for each element of a tile
INFINITY = tl.constexpr(0x7F800000)  # its bits in float32


@triton.jit
def sum_pieces(addresses, pieces, lanes, dtype: tl.constexpr, p: tl.constexpr):
    """Write the sum of |x|^p over each piece of each tensor.

    Args:
        addresses: int64, of each tensor.
        pieces: int64 (pieces, 3): the piece's tensor, where in it it starts and stops.
        lanes: int64 (pieces, LANES), written; see ``exact.pack``. The digits' carries are not
            taken, and they may be negative.
        dtype: Of all tensors.
        p: 1 or 2.
    """
    piece = tl.program_id(0)
    address = tl.load(addresses + tl.load(pieces + 3 * piece))
    start = tl.load(pieces + 3 * piece + 1)
    stop = tl.load(pieces + 3 * piece + 2)
    total = tl.zeros([LANES], tl.int64)
    for first in range(start, stop, TILE):
        total += _sum_tile(_magnitudes(address, first, stop, dtype), dtype, p)
    tl.store(lanes + piece * LANES + tl.arange(0, LANES), total)


@triton.jit
def _magnitudes(address, first, stop, dtype: tl.constexpr):
    """Load a tile as the bits of float32, without the sign; 0 beyond the end.

    A bfloat16 is the upper half of a float32; its conversion need not keep subnormals.
    """
    at = first + tl.arange(0, TILE)
    if dtype == tl.float32:
        pointers = address.to(tl.pointer_type(tl.int32)) + at
        bits = tl.load(pointers, mask=at < stop, other=0) & 0x7FFFFFFF
    else:
        pointers = address.to(tl.pointer_type(tl.int16)) + at
        half = tl.load(pointers, mask=at < stop, other=0) & 0x7FFF
        if dtype == tl.bfloat16:
            bits = half.to(tl.int32) << 16
        else:
            bits = half.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _sum_tile(bits, dtype: tl.constexpr, p: tl.constexpr):
    """Return a tile's lanes."""
    index = tl.arange(0, LANES)
    bad = tl.sum((bits >= INFINITY).to(tl.int64), 0)
    nans = tl.sum((bits > INFINITY).to(tl.int64), 0)
    total = tl.where(index == DIGITS, bad, 0) + tl.where(index == DIGITS + 1, nans, 0)
    bits = tl.where(bits >= INFINITY, 0, bits)
    largest = tl.max(bits, 0)
    smallest = tl.min(tl.where(bits == 0, INFINITY, bits), 0)
    # |x| < 2^top are multiples of 2^low.
    fraction: tl.constexpr = 23 if dtype == tl.float32 else (7 if dtype == tl.bfloat16 else 10)
    top = p * (tl.maximum(largest >> 23, 1) - 126)
    low = p * (tl.maximum(smallest >> 23, 1) - 127 - fraction)
    x = bits.to(tl.float32, bitcast=True).to(tl.float64)
    left = x * x if p == 2 else x
    unit = tl.maximum(top - WIDTH, low)
    more = largest > 0
    while more:
        # Between 2^(52 + unit) and twice that float64 are multiples of 2^unit.
        base = ((unit + 1075).to(tl.int64) << 52) + (1 << 51)
        start = base.to(tl.float64, bitcast=True)
        raised = left + start
        units = tl.sum(raised.to(tl.int64, bitcast=True) - base, 0)
        total += _digits(units, unit - LOW, index)
        left = left - (raised - start)
        more = unit > low
        unit = tl.maximum(unit - 1 - WIDTH, low)
    return total


@triton.jit
def _digits(units, place, index):
    """Return units * 2^place as lanes: three digits, the last one with the sign."""
    first = place >> 5
    shift = (place & 31).to(tl.int64)
    lower = (units & DIGIT) << shift
    upper = ((units >> 32) << shift) + (lower >> 32)
    digits = tl.where(index == first, lower & DIGIT, 0)
    digits += tl.where(index == first + 1, upper & DIGIT, 0)
    return digits + tl.where(index == first + 2, upper >> 32, 0)
