"""The ranks that reduce together, as data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def _always() -> bool:
    return True


@dataclass(frozen=True)
class World:
    """The ranks that reduce together.

    Attributes:
        ranks: Global ranks, in the group's order.
        rank: This one's.
        process_group: What to reduce over; None where this rank is alone.
        device: Where the payload travels; a function of the group alone, so that all ranks agree.
            None where nothing travels.
        holds: Whether these are still the ranks that were meant: process groups begin and end.
        alike: This rank is alone, and others that measure the same must get the same bits.
    """

    ranks: tuple[int, ...]
    rank: int
    process_group: Any = None
    device: torch.device | None = None
    holds: Callable[[], bool] = _always
    alike: bool = False

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)
