"""Whether ranks agree on a number, seen from a sum: each adds its number times a coefficient.

The coefficients of all who must agree add up to zero modulo a prime, so the sum is a multiple of
the prime if they agree; else it is one by chance only, once in as many cases as the prime counts.
"""

import zlib
from functools import lru_cache

SETTINGS = (1 << 20) - 3
"""A prime for what is packed with other numbers."""

BITS = (1 << 31) - 1
"""A prime for hashes of bits."""


def of(*values: object) -> int:
    """Return a number for values, by their ``repr``; the same in every process."""
    return zlib.crc32(repr(values).encode())


@lru_cache(maxsize=64)
def coefficients(count: int, modulus: int, seed: int = 0) -> tuple[int, ...]:
    """Return ``count`` numbers below the modulus that add up to 0 modulo it."""
    mixed = [of(seed, index) % (modulus - 1) + 1 for index in range(count - 1)]
    return (*mixed, -sum(mixed) % modulus)


def share(value: int, index: int, count: int, modulus: int) -> int:
    """Return what the ``index``-th of ``count`` adds to the sum."""
    return value * coefficients(count, modulus)[index] % modulus
