"""What one rank does: build the gradients, count the collectives, take the times.

A barrier stands before every timed call, the time of a call is the maximum over the ranks, and
the gradients are restored outside the timed part. Contenders take turns, call by call.
"""

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from .cases import Case, Gradients, build
from .contenders import CONTENDERS, Clip, Contender, read

FIRST, USUAL, CLIPPED = "first", "usual", "clipped"
STEPS = (FIRST, USUAL, CLIPPED)
"""First: all that a new set of gradients costs, building a `GradClipper` included, on the usual
step. Usual: the norm is half of `max_norm`. Clipped: it is twice `max_norm`."""

_HEADROOM = {FIRST: 2.0, USUAL: 2.0, CLIPPED: 0.5}  # max_norm, in units of the norm
_WARM_UP = (8, 8)  # one tensor of this size, so that imports and connections are not timed
_PATIENCE = timedelta(seconds=120)


@dataclass(frozen=True)
class Settings:
    """What every rank is told.

    Attributes:
        repeats: Timed calls of each contender and kind of step.
        seed: Of the gradients.
        threads: Of each rank.
        turn: Who comes first.
    """

    repeats: int = 7
    seed: int = 0
    threads: int = 1
    turn: int = 0


@dataclass(frozen=True)
class Measurement:
    """One contender in one case and kind of step.

    Attributes:
        case: Name of the case.
        step: One of `STEPS`.
        contender: Name of the contender.
        all_reduces: All-reduces in one call.
        collectives: Collectives of any kind in one call, all-reduces included.
        reading: Collectives more for reading the norm that the call returned.
        building: Collectives for what is built before the first call.
        norm_error: Of the norm, relative to the float64 norm of the whole.
        seconds: Every timed call.
    """

    case: str
    step: str
    contender: str
    all_reduces: int
    collectives: int
    reading: int
    building: int
    norm_error: float
    seconds: list[float] = field(default_factory=list)


def run_rank(rank: int, ranks: int, cases: Sequence[Case], settings: Settings, folder: str) -> None:
    """Measure the cases as one of `ranks` processes; rank 0 writes `measured.json`."""
    torch.set_num_threads(settings.threads)
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=(Path(folder) / "store").as_uri(),
            rank=rank,
            world_size=ranks,
            timeout=_PATIENCE,
        )
    found: list[Measurement] = []
    gc.disable()  # a collection would fall into some calls and not into others
    for case in cases:
        _warm_up(case, settings)
        found += _measure(case, settings)
    if rank == 0:
        text = json.dumps([asdict(one) for one in found])
        (Path(folder) / "measured.json").write_text(text, encoding="utf-8")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _warm_up(case: Case, settings: Settings) -> None:
    small = Case(case.name, 1, _WARM_UP, case.mesh)
    gradients = build(small, settings.seed)
    for contender in CONTENDERS:
        read(contender.make(gradients.parameters)(gradients.norm))


def _measure(case: Case, settings: Settings) -> list[Measurement]:
    gradients = build(case, settings.seed)
    order = _rotate(CONTENDERS, settings.turn)
    clips: dict[str, Clip] = {}
    seconds: dict[tuple[str, str], list[float]] = {}

    for contender in order:
        took, clips[contender.name] = _time_first(contender, gradients)
        seconds[FIRST, contender.name] = [took]
    for step in (USUAL, CLIPPED):
        max_norm = gradients.norm * _HEADROOM[step]
        for repeat in range(settings.repeats):
            for contender in _rotate(order, repeat):
                took = _time(clips[contender.name], max_norm, gradients)
                seconds.setdefault((step, contender.name), []).append(took)
    slowest = _slowest(seconds)
    return [
        _count(case, step, contender, gradients, slowest[step, contender.name])
        for step in STEPS
        for contender in CONTENDERS
    ]


def _time_first(contender: Contender, gradients: Gradients) -> tuple[float, Clip]:
    """Time what a new set of gradients costs, and return what clips it from then on."""
    made: list[Clip] = []

    def make_and_clip(max_norm: float) -> Tensor:
        made.append(contender.make(gradients.parameters))
        return made[0](max_norm)

    return _time(make_and_clip, gradients.norm * _HEADROOM[FIRST], gradients), made[0]


def _time(clip: Clip, max_norm: float, gradients: Gradients) -> float:
    """Time one call on this rank."""
    gradients.restore()
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    clip(max_norm)
    return time.perf_counter() - start


def _slowest(seconds: dict[tuple[str, str], list[float]]) -> dict[tuple[str, str], list[float]]:
    """Take the maximum over the ranks of every single call."""
    if not dist.is_initialized():
        return seconds
    slowest = {}
    for key, mine in seconds.items():
        times = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        slowest[key] = times.tolist()
    return slowest


def _count(
    case: Case, step: str, contender: Contender, gradients: Gradients, seconds: list[float]
) -> Measurement:
    """Count one step's collectives, and see that the step did what it should."""
    gradients.restore()
    max_norm = gradients.norm * _HEADROOM[step]
    with _counting() as build_mode:
        clip = contender.make(gradients.parameters)
    if step != FIRST:
        clip(max_norm)
        gradients.restore()
    with _counting() as step_mode:
        norm = clip(max_norm)
    with _counting() as read_mode:
        value = read(norm)
    _check_scaling(contender, gradients, min(1.0, _HEADROOM[step]))
    kinds = {str(kind): number for kind, number in step_mode.get_comm_counts().items()}
    return Measurement(
        case=case.name,
        step=step,
        contender=contender.name,
        all_reduces=sum(n for kind, n in kinds.items() if "allreduce" in kind.replace("_", "")),
        collectives=step_mode.get_total_counts(),
        reading=read_mode.get_total_counts(),
        building=build_mode.get_total_counts(),
        norm_error=abs(value - gradients.norm) / gradients.norm,
        seconds=seconds,
    )


def _counting() -> CommDebugMode:
    """Count the collectives of a block: c10d's own and the functional ones alike."""
    return CommDebugMode()  # type: ignore[no-untyped-call]


def _check_scaling(contender: Contender, gradients: Gradients, coefficient: float) -> None:
    """Raise unless the gradients are what they were, times the coefficient."""
    for local, saved in zip(gradients.locals, gradients.saved, strict=True):
        if not torch.allclose(local, saved * coefficient, rtol=1e-3):
            raise RuntimeError(
                f"{contender.name}: gradients are not {coefficient} of what they were"
            )


def _rotate(contenders: Sequence[Contender], turn: int) -> list[Contender]:
    turn %= len(contenders)
    return [*contenders[turn:], *contenders[:turn]]
