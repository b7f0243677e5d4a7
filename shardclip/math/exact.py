"""Exact sums as integer lanes: what ranks add up without rounding, and how it is rounded once.

A sum is held as digits of 32 bits, int64 each, so that an integer all-reduce of the lanes adds
exactly, in any order. After the digits come two counts: infinities, and negative infinities; a NaN
is in both, since it is what the two add up to.

Everything here works on any device without a host sync, and for many sums at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardclip.compat import on_host

from .windows import BITS, NUMBER, Window

_DIGIT = (1 << BITS) - 1
_HALF = 1 << (BITS - 1)
_FRACTION = (1 << 52) - 1

_FEW = 16  # sums that are finished in Python's integers


def pack(sums: Sequence[int], infinities: Sequence[int], nans: Sequence[int], w: Window) -> Tensor:
    """Write sums as lanes.

    Args:
        sums: In units of 2^low; not negative, below 2^(32 digits).
        infinities: For each sum, how many infinities are in it.
        nans: How many NaN.
        w: The window.

    Returns:
        int64 of shape ``(len(sums), w.lanes)`` on the host; every digit lies below 2^32.
    """
    raw = b"".join(value.to_bytes(4 * w.digits, "little") for value in sums)
    lanes = torch.zeros(len(sums), w.lanes, dtype=torch.int64, device="cpu")
    if raw:
        digits = torch.frombuffer(bytearray(raw), dtype=torch.int32).view(-1, w.digits)
        torch.bitwise_and(digits.long(), _DIGIT, out=lanes[:, : w.digits])
        nan = on_host(nans, torch.int64)
        lanes[:, w.digits] = on_host(infinities, torch.int64) + nan
        lanes[:, w.digits + 1] = nan
    return lanes


def encode(values: Tensor, w: Window = NUMBER) -> Tensor:
    """Write float64 numbers as lanes, whose sum over ranks ``decode`` rounds once.

    ``decode(encode(a) + encode(b)) == a + b`` in float64, and what cancels leaves exactly 0.

    Args:
        values: float64 of any shape and device.
        w: Bits below its 2^low are dropped (``NUMBER`` has none below: it is exact for all
            float64); a number of 2^(top - 21) or more counts as infinite (none in ``NUMBER``).

    Returns:
        int64 of shape ``(*values.shape, w.lanes)``, every digit between -2^32 and 2^32.
    """
    bits = values.contiguous().view(torch.int64)
    field = (bits >> 52) & 0x7FF
    finite = field < min(0x7FF, w.top - 21 + 1023)
    significand = (bits & _FRACTION) | ((field > 0).long() << 52)
    place = torch.where(finite, field.clamp(min=1) - 1075 - w.low, 0)
    significand = significand >> (-place).clamp(0, 63)
    place = place.clamp(min=0)
    shift = place & (BITS - 1)
    lower = (significand & _DIGIT) << shift
    upper = ((significand >> BITS) << shift) + (lower >> BITS)
    digits = torch.stack([lower & _DIGIT, upper & _DIGIT, upper >> BITS], -1)
    signed = (finite.long() * torch.where(bits < 0, -1, 1)).unsqueeze(-1)
    lanes = torch.zeros(*values.shape, w.lanes, dtype=torch.int64, device=values.device)
    first = (place >> 5).unsqueeze(-1)
    lanes.scatter_(-1, torch.cat([first, first + 1, first + 2], -1), digits * signed)
    lanes[..., w.digits] = ~finite & ~(values < 0)  # a NaN is not below 0
    lanes[..., w.digits + 1] = ~finite & ~(values > 0)
    return lanes


def carry(lanes: Tensor) -> Tensor:
    """Bring digits that were added up back between -2^31 - 1 and 2^31 + 1; the sum is the same.

    Args:
        lanes: int64 of shape ``(..., lanes)``, every digit below 2^62; the last one takes carries
            and passes none on.
    """
    lanes = lanes.clone()
    digits = lanes[..., :-2]
    for _ in range(2):
        over = (digits[..., :-1] + _HALF).bitwise_right_shift_(BITS)
        digits[..., 1:] += over
        digits[..., :-1] -= over.bitwise_left_shift_(BITS)
    return lanes


def widen(lanes: Tensor, w: Window, to: Window) -> Tensor:
    """Write lanes in a window that holds the first one.

    Args:
        lanes: int64 of shape ``(..., w.lanes)``.
        w: Their window.
        to: Another; the two lows lie a multiple of 32 apart.

    Returns:
        int64 of shape ``(..., to.lanes)``.
    """
    before = (w.low - to.low) // BITS
    wide = lanes.new_zeros(*lanes.shape[:-1], to.lanes)
    wide[..., before : before + w.digits] = lanes[..., :-2]
    wide[..., -2:] = lanes[..., -2:]
    return wide


@dataclass(frozen=True)
class _Leading:
    """The leading digits of sums, what follows them, and their value rounded once.

    Attributes:
        digits: int64 ``(..., 5)``, from the lowest to the leading one, which is not 0 unless all
            digits are; each lies between -2^31 - 1 and 2^31 + 1.
        rest: The sign of all that is below.
        unit: The exponent of the third one's unit.
        value: The sum in that unit, correctly rounded.
    """

    digits: Tensor
    rest: Tensor
    unit: Tensor
    value: Tensor


def _leading(lanes: Tensor, w: Window) -> _Leading:
    digits = carry(lanes)[..., : w.digits]
    index = torch.arange(1, w.digits + 1, dtype=torch.int64, device=lanes.device)
    first = ((digits != 0) * index).amax(-1, keepdim=True)  # counts from 1; 0 for none
    below = ((digits != 0) & (index <= first - 5)) * index
    padded = torch.nn.functional.pad(digits, (5, 0))  # digit number i is at 4 + i
    offsets = torch.arange(5, dtype=torch.int64, device=lanes.device)
    five = padded.gather(-1, (first + offsets).clamp(max=w.digits + 4))
    rest = padded.gather(-1, below.amax(-1, keepdim=True) + 4).sign()
    # The leading digit outweighs the others: the sum has no cancellation, and ``low`` no rounding.
    high = five[..., 4].double() * 2.0**64
    middle = five[..., 3].double() * 2.0**32
    total = high + middle
    tail = torch.cat([five[..., 1:2], five[..., :1], rest], -1)
    sign = torch.where(tail[..., 0] != 0, tail[..., 0], tail[..., 1])
    sign = torch.where(sign != 0, sign, tail[..., 2]).sign()
    low = (middle - (total - high)) + five[..., 2].double() + 0.5 * sign.double()
    unit = w.low + BITS * (first.squeeze(-1) - 3)
    return _Leading(five, rest.squeeze(-1), unit, total + low)


def _scaled(value: Tensor, exponent: Tensor) -> Tensor:
    """Return value * 2^exponent in two steps, neither of which leaves float64's range."""
    half = exponent >> 1
    for step in (half, exponent - half):
        value = value * ((step + 1023) << 52).view(torch.float64)
    return value


def _with_counts(value: Tensor, lanes: Tensor) -> Tensor:
    """Put infinities and NaN in."""
    up, down = lanes[..., -2] > 0, lanes[..., -1] > 0
    value = torch.where(up, torch.inf, value)
    return torch.where(down, torch.where(up, torch.nan, -torch.inf), value)


def finish(lanes: Tensor, p: float, w: Window) -> Tensor:
    """Turn sums of |x| (p = 1) or x^2 (p = 2) into norms, rounded once.

    No host sync; a few sums that lie on the host are finished in Python's integers, which is
    faster there and gives the same bits.

    Args:
        lanes: int64 of shape ``(..., w.lanes)``: of up to ``windows.MAX_RANKS`` ranks, added up.
        p: 1 or 2.
        w: The window that they were written with.

    Returns:
        float64 of shape ``(...)`` on the lanes' device: the nearest to the exact norm, ties to
        even.
    """
    if lanes.device.type == "cpu" and lanes.numel() <= _FEW * w.lanes:
        norms = [_finish_integers(row, p, w) for row in lanes.reshape(-1, w.lanes).tolist()]
        return on_host(norms).view(lanes.shape[:-1])
    return root(lanes, w) if p == 2 else decode(lanes, w)


def _finish_integers(row: list[int], p: float, w: Window) -> float:
    *digits, up, down = row
    if up or down:
        return math.nan if up and down else math.copysign(math.inf, up - down)
    total = 0
    for digit in reversed(digits):
        total = (total << BITS) + digit
    exponent = w.low
    if p == 2:
        shift = max(0, 130 - total.bit_length()) & -2
        found = math.isqrt(total << shift)
        total = 2 * found + (found * found != total << shift)  # what is cut off still rounds
        exponent = (exponent - shift) // 2 - 1
    try:
        return total / (1 << -exponent) if exponent < 0 else float(total << exponent)
    except OverflowError:  # beyond float64
        return math.inf


def decode(lanes: Tensor, w: Window = NUMBER) -> Tensor:
    """Round each sum to the nearest float64, ties to even.

    Args:
        lanes: int64 of shape ``(..., w.lanes)``: of up to ``windows.MAX_RANKS`` ranks, added up.
        w: The window that they were written with.

    Returns:
        float64 of shape ``(...)``.
    """
    found = _leading(lanes, w)
    return _with_counts(_scaled(found.value, found.unit), lanes)


def root(lanes: Tensor, w: Window) -> Tensor:
    """Return the square root of each sum, rounded once to the nearest float64, ties to even.

    Args:
        lanes: int64 of shape ``(..., w.lanes)``: sums of squares, added up over the ranks.
        w: The window that they were written with.

    Returns:
        float64 of shape ``(...)``.
    """
    found = _leading(lanes, w)
    # 110 bits of the sum give 55 of the root: 53, and two to round by.
    bits = ((found.value.view(torch.int64) >> 52) & 0x7FF) - 1022
    place = torch.where(found.value > 0, ((bits - 109) >> 1 << 1) + 64, 64)  # of the fifth digit
    high, low = _words(found)
    one = torch.ones_like(place)
    square = (high << (64 - place)) | ((low >> place) & ((one << (64 - place)) - 1))
    inexact = ((low & ((one << place) - 1)) != 0) | (found.rest != 0)
    guess = _scaled(found.value, 64 - place).sqrt().long().clamp(min=1)
    # The difference of numbers of 110 bits is itself small: modulo 2^64 is enough.
    left = square - guess * guess
    step = torch.div(left, 2 * guess, rounding_mode="floor")
    left = left - step * (2 * guess + step)
    guess = guess + step
    below = (left < 0).long()  # by the step's square; it is never too far the other way
    guess, left = guess - below, left + below * (2 * guess - 1)
    value = 2 * guess + (inexact | (left != 0)).long()
    exponent = ((found.unit - 64 + place) >> 1) - 1
    return _with_counts(torch.where(found.value > 0, _rounded(value, exponent), 0.0), lanes)


def _words(found: _Leading) -> tuple[Tensor, Tensor]:
    """Return the four lower digits as two words of 64 bits, with no negative digits left."""
    digits = list(found.digits.unbind(-1))
    digits[0] = digits[0] - (found.rest < 0).long()
    for index in range(4):
        digits[index + 1] = digits[index + 1] + (digits[index] >> BITS)
        digits[index] = digits[index] & _DIGIT
    return (digits[3] << BITS) | digits[2], (digits[1] << BITS) | digits[0]


def _rounded(value: Tensor, exponent: Tensor) -> Tensor:
    """Round 56 bits to the 53 of float64, or to fewer where the result is subnormal."""
    drop = (-1074 - exponent).clamp(3, 60)
    kept = value >> drop
    dropped = value - (kept << drop)
    half = torch.ones_like(drop) << (drop - 1)
    up = (dropped > half) | ((dropped == half) & (kept % 2 == 1))
    return _scaled((kept + up.long()).double(), exponent + drop)
