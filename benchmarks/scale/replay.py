"""What thousands of ranks would say, from one of each pipeline stage."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from shardclip.comm import reduce
from shardclip.comm.world import World

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Layout:
    """Sizes of the four axes, outermost first."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the sizes in the order of `AXES`."""
        return self.pp, self.dp_replicate, self.dp_shard, self.tp

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return " x ".join(map(str, self.sizes))


class EnoughError(Exception):
    """Stops a rank that was only asked what it says."""


@dataclass
class Replay:
    """Stands in for the gathers: says for every rank what one rank of its stage said.

    Attributes:
        layout: Which rank is on which stage: the first axis.
        told: Gather by gather, each stage's value.
        stage: Who is asked now.
        gathers: How many there were.
        asked: Whether this stage is only asked: it stops at the first gather that is new to it.
    """

    layout: Layout
    told: list[dict[int, Any]] = field(default_factory=list)
    stage: int = 0
    gathers: int = 0
    asked: bool = False

    def __call__(self, value: Any, world: World) -> list[Any]:
        """Gather, as ``reduce.gather`` does."""
        index, self.gathers = self.gathers, self.gathers + 1
        if index == len(self.told):
            self.told.append({})
        values = self.told[index]
        known = self.stage in values
        values[self.stage] = value
        if self.asked and not known:
            raise EnoughError
        each = self.layout.ranks // self.layout.pp
        # Digests come from every rank; what they stand for comes from the first that has it.
        digest = isinstance(value, bytes) and len(value) == 32
        said: list[Any] = []
        for stage in range(self.layout.pp):
            first, rest = values[stage], values[stage] if digest else None
            said += [first] + [rest] * (each - 1)
        return said

    @contextmanager
    def of(self, stage: int, *, asked: bool) -> Iterator[None]:
        """Let one stage's rank gather."""
        self.stage, self.gathers, self.asked = stage, 0, asked
        with mock.patch.object(reduce, "gather", self):
            yield
