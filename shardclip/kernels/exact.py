"""Exact sums of |x| and x^2 in plain torch operations: the same lanes for any split and order.

A block of x^2, which float64 holds exactly, is added to a number so large that the sum keeps only
multiples of a unit; then the bits of the results count units, and their integer sum is exact. What
was cut off goes through the same with a smaller unit, until nothing is left: twice for ordinary
gradients. The split is the one in Rump, Ogita and Oishi, "Accurate floating-point summation part
I" (2008), with integers in place of their floating-point sums. On CPU many numbers of 16 bits are
counted instead, code by code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardclip.compat import in_storage_order, real_view, to_device
from shardclip.math import exact, windows

from .formats import KINDS, Kind, significands
from .packing import packs

_PACKED = 1 << 18  # about so many elements in one pack
_BLOCK = 1 << 17  # elements that go through together: their float64 stay in cache
_ROW = 1 << 12  # elements of one sum: short rows leave more bits for each
_COUNTED = 1 << 15  # from here on, 16-bit numbers are counted, code by code
_BLOCK_ELSEWHERE = 1 << 22  # on other devices, where every block costs host syncs
_RANGE = 400  # binades between a float64 block's largest and smallest bit whose squares fit


def check(dtype: torch.dtype, p: float) -> None:
    """Make sure that sums over this dtype can be exact.

    Raises:
        ValueError: p is not 1 or 2, the dtype is unknown, or |x| is itself rounded.
    """
    if p not in (1, 2):
        raise ValueError(f"exact=True takes norm_type 1 or 2, got {p}; pass exact=False")
    if dtype.is_complex and p == 1:
        raise ValueError(
            f"exact=True cannot sum magnitudes of {dtype}: they are irrational; "
            "pass norm_type=2 or exact=False"
        )
    if not dtype.is_complex and dtype not in KINDS:
        raise ValueError(f"exact=True does not take {dtype}; cast it to float32 first")


@dataclass
class _Total:
    """A bucket's sum, in units of 2^low of the window, and what in it is not finite.

    Attributes:
        units: The sum.
        infinities: How many.
        nans: How many.
        codes: For a dtype of 16 bits, how often each code occurs, without the sign.
    """

    units: int = 0
    infinities: int = 0
    nans: int = 0
    codes: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def count(self, flat: Tensor) -> None:
        """Count codes: up to 2^40 in all, whose squares int64 holds."""
        for block in torch.split(flat.view(torch.int16), _COUNTED << 5):
            found = torch.bincount(block & 0x7FFF, minlength=1 << 15)
            before = self.codes.get(flat.dtype)
            self.codes[flat.dtype] = found if before is None else before.add_(found)

    def fold_counts(self, p: int, low: int) -> None:
        """Add what was counted to the sum."""
        for dtype, codes in self.codes.items():
            kind = KINDS[dtype]
            by_field = codes.view(-1, 1 << kind.fraction)
            *sums, _ = (by_field * significands(kind.fraction, p)).sum(1).tolist()
            infinities, *_ = by_field[-1].tolist()
            self.infinities += infinities
            self.nans += int(by_field[-1].sum()) - infinities
            for number, units in enumerate(sums):
                if units:
                    self.units += units << (p * (max(number, 1) - 1 + kind.least) - low)


class ExactSums:
    """Sum |x| or x^2 per bucket, exactly.

    Subnormals count even where ``torch.set_flush_denormal`` is on: they are read as integers. Takes
    tensors on any device; those that are not on CPU cost some host syncs for every four million
    elements. ``exact_triton`` does it without.
    """

    each: Tensor | None = None

    def __init__(
        self,
        tensors: Sequence[Tensor],
        buckets: Sequence[int],
        count: int,
        window: windows.Window,
    ) -> None:
        """Group the tensors.

        Args:
            tensors: float64, float32, bfloat16, float16 or complex, of any shape and stride.
            buckets: For each tensor, the bucket its sum goes to.
            count: How many buckets there are.
            window: Which lanes to write, the same on all ranks; ``windows.window`` chooses them.

        Raises:
            ValueError: A float64 tensor, and a window that is too narrow for it.
        """
        self._count = count
        self._window = window
        self._home = tensors[0].device if tensors else torch.device("cpu")
        self._runs: list[tuple[int, list[int]]] = []  # bucket, and what is read in one go
        self._scratch: dict[object, Tensor] = {}
        by_bucket: list[list[int]] = [[] for _ in range(count)]
        for index, (tensor, bucket) in enumerate(zip(tensors, buckets, strict=True)):
            needs = windows.window([tensor.dtype])
            if needs.digits > window.digits:
                raise ValueError(f"exact=True needs a wider window for tensor {index}: {needs}")
            by_bucket[bucket].append(index)
        for bucket, held in enumerate(by_bucket):
            self._runs += [(bucket, together) for together, _ in packs(tensors, held, _PACKED)]

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor], p: float) -> Tensor:
        """Sum tensors like those that this was built for.

        Returns:
            int64 of shape ``(count, window.lanes)`` on the first tensor's device; see
            ``exact.pack``.

        Raises:
            ValueError: See ``check``.
        """
        totals = [_Total() for _ in range(self._count)]
        for bucket, together in self._runs:
            flat = flatten([tensors[index] for index in together], p)
            on_cpu = flat.device.type == "cpu"
            if on_cpu and flat.dtype.itemsize == 2 and flat.numel() >= _COUNTED:
                totals[bucket].count(flat)
                continue
            for block in torch.split(flat, _BLOCK if on_cpu else _BLOCK_ELSEWHERE):
                self._add(totals[bucket], block, int(p))
        for total in totals:
            total.fold_counts(int(p), self._window.low)
        lanes = exact.pack(
            [total.units for total in totals],
            [total.infinities for total in totals],
            [total.nans for total in totals],
            self._window,
        )
        return to_device(lanes, self._home)

    def _add(self, total: _Total, block: Tensor, p: int) -> None:
        if not block.numel():
            return
        kind = KINDS[block.dtype]
        order = self._buffer(block, kind.bits)
        torch.add(self._sign(block, kind), block.view(kind.bits), alpha=2, out=order)
        ends = order.aminmax()
        smallest, largest = ((int(end) - kind.sign) >> 1 for end in ends)
        if largest >= kind.infinity:
            nans = int(block.isnan().sum())
            total.nans += nans
            total.infinities += int((~block.isfinite()).sum()) - nans
            self._add(total, torch.where(block.isfinite(), block, 0), p)
            return
        if not largest:
            return
        if not smallest:  # of those that are not 0, which now wrap around
            smallest = (int(order.sub_(1).amin()) + 1 - kind.sign) >> 1
        top = max(largest >> kind.fraction, 1) + kind.fraction + kind.least
        low = max(smallest >> kind.fraction, 1) - 1 + kind.least
        if kind.bits == torch.int64 and top - low > _RANGE:
            for part in _by_size(block, (top + low) // 2):
                self._add(total, part, p)
            return
        scale = min(max(-top, -1000), 1000) if kind.bits == torch.int64 else 0
        wide = self._widen(block, kind, scale, smallest)
        units = self._sum(wide, top + scale, low + scale, p, kind)
        total.units += units << (p * low - self._window.low)

    def _widen(self, block: Tensor, kind: Kind, scale: int, smallest: int) -> Tensor:
        """Return block * 2^scale in float64."""
        wide = self._buffer(block, torch.float64)
        # A float16 is several times faster through float32.
        wide.copy_(block.float() if block.dtype == torch.float16 else block)
        if scale:
            wide.mul_(2.0**scale)
        if not smallest >> kind.fraction:
            # Subnormals are taken from their bits: the processor may be told to flush them.
            bits = block.view(kind.bits) & ~kind.sign
            tiny = bits.double() * math.ldexp(1.0, kind.least + scale)
            torch.where(bits < 1 << kind.fraction, tiny, wide, out=wide)
        return wide

    def _sum(self, wide: Tensor, top: int, low: int, p: int, kind: Kind) -> int:
        """Sum |x|^p where |x| < 2^top are multiples of 2^low; in units of 2^(p low)."""
        spare = self._buffer(wide, torch.float64, "spare")
        if p == 1:
            return _sum_units(wide.abs_(), spare, top, low)
        if kind.fraction <= 25:  # float64 holds the squares
            return _sum_units(wide.mul_(wide), spare, 2 * top, 2 * low)
        # x = h + l with 26 bits each and a sign: h^2, 2 h l and l^2 fit.
        high = ((wide.view(torch.int64) + (1 << 26)) & -(1 << 27)).view(torch.float64)
        rest = wide - high
        units = _sum_units(high * rest * 2, spare, 2 * top - 25, 2 * low)
        units += _sum_units(rest.mul_(rest), spare, 2 * top - 53, 2 * low)
        return units + _sum_units(high.mul_(high), spare, 2 * top + 1, 2 * low)

    def _sign(self, block: Tensor, kind: Kind) -> Tensor:
        key = block.device, kind.bits, "sign"
        if key not in self._scratch:
            sign = torch.tensor(kind.sign, dtype=kind.bits, device=block.device)
            self._scratch[key] = sign
        return self._scratch[key]

    def _buffer(self, block: Tensor, dtype: torch.dtype, name: str = "") -> Tensor:
        key = block.device, dtype, name
        size = block.numel()
        if key not in self._scratch or self._scratch[key].numel() < size:
            self._scratch[key] = torch.empty(size, dtype=dtype, device=block.device)
        buffer = self._scratch[key]
        return buffer if buffer.numel() == size else buffer[:size]


def _sum_units(values: Tensor, spare: Tensor, top: int, low: int) -> int:
    """Sum float64 of up to 2^top that are multiples of 2^low; in units of 2^low.

    Overwrites ``values`` and ``spare``.
    """
    count = values.numel() if values.numel() % _ROW else _ROW
    log = (count - 1).bit_length()
    width = min(61 - log, 50)
    total: int = 0
    rows, spare_rows = values.view(-1, count), spare.view(torch.int64).view(-1, count)
    while top - low + log > 53:
        unit = max(top - width, low)
        base = math.ldexp(1.5, 52 + unit)  # float64 between 2^(52 + unit) and twice that are units
        torch.add(values, base, out=spare)
        bits = ((unit + 1075) << 52) + (1 << 51)  # of base
        found = spare_rows.sum(1).sub_(_signed(count * bits))  # modulo 2^64, then below 2^62
        total += sum(found.tolist()) << (unit - low)
        if unit == low:
            return total
        values.sub_(spare.sub_(base))
        top = unit - 1
    sums = rows.sum(1).tolist()  # of few bits: not rounded
    return total + sum(int(math.ldexp(row, -low)) for row in sums)


def _signed(value: int) -> int:
    """Return the int64 that is the same modulo 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _by_size(block: Tensor, middle: int) -> tuple[Tensor, Tensor]:
    """Split float64 into numbers from 2^middle up and those below, with 0 for the others."""
    bits = block.view(torch.int64) & ~(-1 << 63)
    edge = (middle + 1023) << 52 if middle > -1023 else 1 << (middle + 1074)
    return torch.where(bits >= edge, block, 0), torch.where(bits < edge, block, 0)


def flatten(tensors: list[Tensor], p: float) -> Tensor:
    """Join tensors of one kind as real numbers in one dimension, in any order."""
    for tensor in tensors[:1]:
        check(tensor.dtype, p)
    joined = tensors[0]
    if len(tensors) > 1:
        joined = torch.cat(tensors) if joined.dim() else torch.stack(tensors)
    joined = real_view(joined)
    if not joined.is_contiguous():
        joined = in_storage_order(joined)
    return joined.detach().reshape(-1).resolve_neg()
