"""Modelled, not measured: how long the all-reduces of a step take on up to 16,384 GPUs.

An alpha-beta model: each all-reduce costs a latency that grows with the depth of its tree, and its
bytes divided by a bandwidth. The constants and the formula of a tree's latency are NVIDIA's own, by
which NCCL chooses its algorithms: `src/graph/tuning.cc` of https://github.com/NVIDIA/nccl at commit
01afd20a77b5804e0ecf1042509dd9d20ebf9e93 (`baseLat`, `hwLat`, tree algorithm, LL protocol). For 4
KiB on a public H100 cluster the model said 25.9 us where nccl-tests measured 75 us (NVIDIA/nccl
issue 1453): take the figures as lower bounds, and their ratios rather than their size. Launching
kernels, waiting for the slowest rank and reading the gradients are not in it.
"""

import math
from dataclasses import dataclass

from .replay import Layout

BASE_US = 4.4
"""Of any all-reduce."""

NVLINK_US = 0.52 * 1.8
"""Each step between two GPUs of a node; where there are several nodes, 1.8 times the latency."""

NETWORK_US = 5.0
"""Each step between two nodes."""

BYTES_PER_US = 80e3 / 3.8 / 2
"""80 GB/s on the bus, of which LL uses 1/3.8, and half of that as seen by an all-reduce."""

NODE = 8
"""GPUs in a node: the tensor-parallel axis fills it, every other axis crosses nodes."""


@dataclass(frozen=True)
class Way:
    """A way to clip.

    Attributes:
        name: As in the other tables.
        axes: Its all-reduces: the mesh axes that each spans.
        lanes: Numbers that travel in each.
        number: Bytes of each number.
    """

    name: str
    axes: tuple[tuple[str, ...], ...]
    lanes: int = 1
    number: int = 4


def ways(lanes: int) -> tuple[Way, ...]:
    """List the ways; counted, not guessed: each all-reduce stands in the tables of `benchmarks`.

    Args:
        lanes: Of this library's all-reduce, from the plan.
    """
    sharded = (("dp_shard",), ("tp",))  # a DTensor's norm is reduced axis by axis
    replica = ("pp", "dp_shard", "tp")
    return (
        Way("torch (each stage its own norm)", sharded),
        Way("torchtitan", (*sharded, ("pp",))),
        Way("GradClipper", (("dp_replicate", *replica),), lanes, 8),
        Way("GradClipper, group= of a replica", (replica,), lanes, 8),  # each reads all of it
    )


def microseconds(way: Way, layout: Layout) -> float:
    """Add up a step's all-reduces."""
    size = way.lanes * way.number
    return sum(_all_reduce(axes, layout, size) for axes in way.axes)


def _all_reduce(axes: tuple[str, ...], layout: Layout, size: int) -> float:
    ranks = math.prod(getattr(layout, axis) for axis in axes)
    if ranks == 1:
        return 0.0
    inside = min(NODE, layout.tp) if "tp" in axes else 1
    nodes = ranks // inside
    intra = NVLINK_US if nodes > 1 else NVLINK_US / 1.8
    latency = BASE_US + 2 * ((inside - 1) * intra + math.log2(nodes) * NETWORK_US)
    return latency + size / BYTES_PER_US
