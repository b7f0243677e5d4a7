"""Copies compared bit for bit: what a tolerant sample passes over, as one flipped bit.

Every holder hashes all bits and positions of its copy; the hashes of all its tensors go, times
coefficients that cancel over the holders, into two lanes of the one all-reduce.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shardclip.compat import on_host, real_view, to_device
from shardclip.math import fingerprints

from .proof import Copy

LANES = 2  # one for each half of the hashes

ROW = 1 << 12  # numbers with weights of their own; then the rows have weights
_BLOCK = 1 << 17  # numbers that go through together: their int64 stay in cache
_BLOCK_ELSEWHERE = 1 << 24
_WORD = (1 << 32) - 1


def hash_of(tensor: Tensor) -> Tensor:
    """Hash all bits of a tensor and where they are: a 0-dim int64 tensor on its device.

    The sum of the bits as 32-bit integers, each times an odd number that depends on its place,
    modulo 2**64. A flipped bit always changes it; a swapped pair, or anything else, escapes with a
    chance of 2**-32 at most.
    """
    rows = row_hashes(tensor)
    index = torch.arange(rows.numel() + 1, dtype=torch.int64, device=rows.device)
    rows = torch.cat([rows, torch.full_like(index[:1], tensor.numel())])  # zeros have no bits
    return (rows * _mixed(index + (1 << 40))).sum()


def hash_of_local(local: Tensor, values: Tensor) -> Tensor:
    """Hash a local gradient: of a sparse one its values and where they are."""
    if local.layout == torch.strided:
        return hash_of(values)
    places = torch.Tensor.to_sparse(local).coalesce().indices()
    return hash_of(values) + 3 * hash_of(places)


def row_hashes(tensor: Tensor) -> Tensor:
    """Hash each ``ROW`` of a tensor's numbers in logical order: int64 on its device."""
    bits = _bits(tensor)
    full, rest = divmod(bits.numel(), ROW)
    out = torch.zeros(full + bool(rest), dtype=torch.int64, device=bits.device)
    weights = to_device(_weights(), bits.device)
    step = (_BLOCK if bits.device.type == "cpu" else _BLOCK_ELSEWHERE) // ROW
    rows = bits[: full * ROW].view(-1, ROW)
    for start in range(0, full, step):
        block = rows[start : start + step].long()
        torch.sum(block.mul_(weights), dim=1, out=out[start : start + len(block)])
    if rest:
        out[full] = (bits[full * ROW :].long() * weights[:rest]).sum()
    return out


def _bits(tensor: Tensor) -> Tensor:
    """View numbers as integers of at most 32 bits, which leaves room for the weights."""
    flat = real_view(tensor).detach().resolve_neg().reshape(-1).contiguous()
    return flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)


def _mixed(index: Tensor) -> Tensor:
    """Turn numbers into odd ones that look random, the same everywhere."""
    x = index * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x | 1


@lru_cache(maxsize=1)
def _weights() -> Tensor:
    return _mixed(torch.arange(ROW, dtype=torch.int64, device="cpu"))


class Drift:
    """What one plan's copies need to be compared bit for bit, worked out once."""

    def __init__(self, copies: Sequence[Copy], device: torch.device) -> None:
        prime = fingerprints.BITS
        shares = []
        for copy in copies:
            own = fingerprints.coefficients(copy.count, prime)[copy.index]
            # Tensors have factors of their own, so that two differences do not cancel.
            factors = [
                fingerprints.of(copy.ordinal, copy.holders[0], lane) % (prime - 1) + 1
                for lane in range(LANES)
            ]
            shares.append([own * factor % prime for factor in factors])
        self._shares = to_device(on_host(shares, torch.int64), device)

    def hashes(self, values: Sequence[Tensor], local: Sequence[Tensor]) -> Tensor:
        """Hash the copies, in the order that this was built for: int64."""
        device = self._shares.device
        pairs = zip(local, values, strict=True)
        return torch.stack([to_device(hash_of_local(*pair), device) for pair in pairs])

    def lanes(self, hashes: Tensor) -> Tensor:
        """Return this rank's part of the two lanes: float64, whole numbers below 2**31."""
        prime = fingerprints.BITS
        halves = torch.stack([hashes & _WORD, (hashes >> 32) & _WORD], dim=1) % prime
        return ((halves * self._shares) % prime).sum(0).remainder(prime).double()


def found(lanes: Tensor) -> bool:
    """Whether the reduced lanes show that some copies differ."""
    return any(int(lane) % fingerprints.BITS for lane in lanes.tolist())
