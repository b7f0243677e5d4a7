"""A plan's pieces: where each source sits, and the sums that they add to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardclip.copies import Copy
from shardclip.layout import Ownership, Source, segment


@dataclass(frozen=True)
class Seat:
    """What is settled about one source: where it counts, and how.

    Attributes:
        source: Whose gradient.
        position: Its place in the list that the plan was made for.
        bucket: Index of the sum that it adds to.
        part: Which part of it this rank reads, of how many; None: nothing.
        copy: What it owes to the proof, where other ranks hold copies.
        declared: A layout vouches for it.
        owned: Who holds it.
    """

    source: Source
    position: int = 0
    bucket: int = 0
    part: tuple[int, int] | None = (0, 1)
    copy: Copy | None = None
    declared: bool = False
    owned: Ownership | None = None


@dataclass(frozen=True)
class Bucket:
    """One sum: the group it counts in, its key if any, and by what it is multiplied."""

    group: int
    key: int | None
    weight: float


def cut(seat: Seat, whole: Tensor) -> Tensor:
    """Return the part of a local tensor that this rank reads."""
    if seat.part is None or seat.part == (0, 1):
        return whole
    # In logical order, so that copies of other strides agree.
    start, stop = segment(whole.numel(), *seat.part)
    return whole.reshape(-1)[start:stop]
