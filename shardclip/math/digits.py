"""Small whole numbers packed into float64 lanes, so that their sums over ranks stay apart."""

from collections.abc import Sequence

import torch
from torch import Tensor

_EXACT = 2**53  # float64 holds every integer up to here

ALONE = _EXACT
"""A limit that gives a number a lane of its own."""


class Digits:
    """Numbers whose sums have known limits; as many share a lane as it holds exactly."""

    def __init__(self, limits: Sequence[int]) -> None:
        """Take for each number what its sum stays below; 1 takes no room."""
        self.limits = tuple(limits)
        self._where: list[tuple[int, int]] = []
        lane, place = 0, 1
        for limit in self.limits:
            if place > 1 and place * limit > _EXACT:
                lane, place = lane + 1, 1
            self._where.append((lane, place))
            place *= limit
        self.lanes = lane + 1

    def write(self, values: Sequence[int]) -> list[float]:
        """Write one rank's numbers as lanes."""
        lanes = [0] * self.lanes
        for value, (lane, place) in zip(values, self._where, strict=True):
            lanes[lane] += value * place
        return [float(lane) for lane in lanes]

    def read(self, lanes: Sequence[float]) -> list[int]:
        """Read the sums."""
        pairs = zip(self._where, self.limits, strict=True)
        return [int(lanes[lane]) // place % limit for (lane, place), limit in pairs]

    def sum_of(self, lanes: Tensor, index: int) -> Tensor:
        """Read one number's sum on the device: a 0-dim int64 tensor."""
        lane, place = self._where[index]
        whole = lanes[lane].long()
        found: Tensor = torch.div(whole, place, rounding_mode="floor") % self.limits[index]
        return found
