"""Measured: what it takes to build a GradClipper on one of up to 16,384 ranks, in one process.

The ranks are those of torch's "fake" process group, which sends nothing. What the other ranks would
say is replayed: ranks of one pipeline stage say the same, so one of each stage is asked before. The
parameters have a real model's shapes; their local tensors are views of memory that nobody touches.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardclip
from benchmarks.cases import Llama, Shape
from shardclip.comm.world import World
from shardclip.layout.ownership import segment
from shardclip.layout.planner import Planner
from shardclip.layout.sources import of_iterable
from shardclip.plan import plan
from shardclip.plan.plan import Plan
from shardclip.plan.seats import Seat

from .replay import AXES, EnoughError, Layout, Replay


@dataclass(frozen=True)
class Planned:
    """What was found for a model and a layout.

    Attributes:
        parameters: Of this rank.
        build: CPU seconds to build a GradClipper, the other ranks' answers being there.
        first: CPU seconds to make the first step's plan.
        memory: Most bytes that Python held more than before, while doing both.
        kept: Bytes that it holds more afterwards.
        lanes: Numbers in the all-reduce.
        held: Elements that a rank holds.
        fair: Elements that each rank would read if the work were spread evenly over the replicas.
        most: Elements that the busiest of them reads.
    """

    parameters: int
    build: float
    first: float
    memory: int
    kept: int
    lanes: int
    held: int
    fair: float
    most: int


def measure(model: Llama, layout: Layout) -> Planned:
    """Build a GradClipper on the first rank of the first stage, and plan its first step."""
    replay = Replay(layout)
    gathers = 4  # two to agree on names, two on lanes
    for _ in range(gathers):
        for stage in range(layout.pp):
            with _world(layout, stage) as mesh, replay.of(stage, asked=True):
                try:
                    shardclip.GradClipper(_parameters(model, layout, stage, mesh), 1.0)
                except EnoughError:
                    continue
                raise RuntimeError(f"building a GradClipper makes fewer than {gathers} gathers")
    with _world(layout, 0) as mesh:
        held = _parameters(model, layout, 0, mesh)
        grads = [_gradient(one) for _, one in held]

        def both() -> tuple[float, float, Plan]:
            return _build_and_plan(replay, held, grads)

        build, first, made = both()
        memory, kept = _memory(both)
        reading = _balance(layout, held, grads)
    local = sum(_local(one).numel() for one in grads)
    return Planned(len(held), build, first, memory, kept, made.lanes.size, local, *reading)


def _build_and_plan(
    replay: Replay, held: Sequence[tuple[str, nn.Parameter]], grads: Sequence[Tensor]
) -> tuple[float, float, Plan]:
    by_id = {id(one): grad for (_, one), grad in zip(held, grads, strict=True)}
    gc.collect()  # a collection would fall into one plan and not into another
    gc.disable()
    start = time.thread_time()
    with replay.of(0, asked=False):
        clipper = shardclip.GradClipper(held, 1.0, grad=lambda one: by_id[id(one)])
    built = time.thread_time()
    made = clipper._collector.collect(None, None, ()).plan
    planned = time.thread_time()
    gc.enable()
    if made.problems:
        raise RuntimeError(str(made.problems[0]))
    return built - start, planned - built, made


def _memory(action: Callable[[], object]) -> tuple[int, int]:
    """Return the most bytes held more than before, and those held afterwards."""
    tracemalloc.start()
    try:
        result = action()
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del result
    return peak, now


def _balance(
    layout: Layout, held: Sequence[tuple[str, nn.Parameter]], grads: Sequence[Tensor]
) -> tuple[float, int]:
    """Plan on every rank that holds a copy of anything that rank 0 holds.

    Returns:
        The fair share of elements, and the most that a rank reads.

    Raises:
        RuntimeError: An element is read twice, or by nobody.
    """
    read: list[int] = []
    ranges: list[list[tuple[int, int]]] = [[] for _ in held]
    for rank in _replicas(layout):
        made = _plan_on(rank, layout, held, grads)
        mine = 0
        for seat in made.seats:
            numel = _local(grads[seat.position]).numel()
            start, stop = read_by(seat, numel)
            ranges[seat.position].append((start, stop))
            mine += stop - start
        read.append(mine)
    _check_cover(layout, held, grads, ranges)
    return sum(read) / len(read), max(read)


def _replicas(layout: Layout) -> list[int]:
    """List the ranks of the first stage that hold the same shard as rank 0, on all tp ranks.

    A vector is the same on the tp ranks too, so these are all that share in reading it.
    """
    inner = layout.dp_shard * layout.tp
    return [r * inner + tp for r in range(layout.dp_replicate) for tp in range(layout.tp)]


def _plan_on(
    rank: int, layout: Layout, held: Sequence[tuple[str, nn.Parameter]], grads: Sequence[Tensor]
) -> Plan:
    planner = Planner(World(tuple(range(layout.ranks)), rank), None)
    pairs = list(zip(of_iterable(held), grads, strict=True))
    made = plan.make(planner, pairs, plan.FUNCTION_LANES, spread=True)
    if made.problems:
        raise RuntimeError(str(made.problems[0]))
    return made


def read_by(seat: Seat, numel: int) -> tuple[int, int]:
    """Return the half-open range of the flat local tensor that this rank reads."""
    return (0, 0) if seat.part is None else segment(numel, *seat.part)


def _check_cover(
    layout: Layout,
    held: Sequence[tuple[str, nn.Parameter]],
    grads: Sequence[Tensor],
    ranges: Sequence[list[tuple[int, int]]],
) -> None:
    """See that the holders of each piece read every element once."""
    for (name, _), grad, found in zip(held, grads, ranges, strict=True):
        pieces = 1 if grad.dim() == 1 else layout.tp  # a matrix lies in pieces on the tp ranks
        numel = _local(grad).numel()
        marks: dict[int, int] = {}
        for start, stop in found:
            marks[start] = marks.get(start, 0) + 1
            marks[stop] = marks.get(stop, 0) - 1
        depth, last = 0, 0
        for mark, change in sorted(marks.items()):
            if mark > last and depth != pieces:
                raise RuntimeError(f"{name}: elements {last} to {mark} are read {depth} times")
            depth, last = depth + change, mark
        if last != numel:
            raise RuntimeError(f"{name}: elements from {last} are read by nobody")


@contextmanager
def _world(layout: Layout, stage: int) -> Iterator[DeviceMesh]:
    """Be the first rank of a stage; yield the stage's own mesh."""
    rank = stage * (layout.ranks // layout.pp)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.ranks)
    try:
        root = init_device_mesh("cpu", layout.sizes, mesh_dim_names=AXES)
        yield root[AXES[1:]]
    finally:
        dist.destroy_process_group()


def _parameters(
    model: Llama, layout: Layout, stage: int, mesh: DeviceMesh
) -> list[tuple[str, nn.Parameter]]:
    """List a stage's parameters as FSDP2 over tensor parallel has them, on its first rank."""
    held = []
    for name, shape in model.stage(stage, layout.pp).items():
        placements, local = _piece(name, shape, layout)
        strides = torch.empty(shape, device="meta").stride()
        meta = TensorMeta(torch.Size(shape), strides, torch.float32)
        spec = DTensorSpec(mesh, placements, tensor_meta=meta)
        one = DTensor(torch.empty(local), spec, requires_grad=False)  # type: ignore[no-untyped-call]
        held.append((name, nn.Parameter(one, requires_grad=False)))
    return held


def _piece(name: str, shape: Shape, layout: Layout) -> tuple[tuple[Placement, ...], Shape]:
    """Return placements over the stage's mesh, and the local shape on its first rank."""
    if len(shape) == 1:
        return (Replicate(), Shard(0), Replicate()), (-(-shape[0] // layout.dp_shard),)
    by_columns = name.endswith(("wo.weight", "w2.weight"))
    rows, columns = shape
    if by_columns:
        local = (-(-rows // layout.dp_shard), columns // layout.tp)
        return (Replicate(), Shard(0), Shard(1)), local
    local = (-(-(rows // layout.tp) // layout.dp_shard), columns)
    return (Replicate(), _StridedShard(0, split_factor=layout.tp), Shard(0)), local


def _gradient(parameter: Tensor) -> Tensor:
    whole: Any = parameter
    return DTensor(whole._local_tensor, whole._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor
    return local
