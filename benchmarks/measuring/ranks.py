"""What one rank does: build the gradients, take the times, count.

A barrier stands before every timed call, and the time of a call is the maximum over the ranks.
Contenders take turns of a few calls, in an order that is drawn for every round of turns. The first
call of a turn is not timed: it pays for what the contender before has left behind, in the caches
and in the scheduler's book. Gradients are new objects in every call, as after a backward pass;
their values are restored, outside the timed part, where a call has changed them.
"""

import gc
import json
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.cases import LAYOUTS, Case, Gradients, UnavailableError, build, tiny
from benchmarks.contenders import (
    CLIPPED,
    FIRST,
    HEADROOM,
    OURS,
    STEPS,
    USUAL,
    Clipping,
    Contender,
    present,
    read,
)
from benchmarks.counting import Counts, as_on_a_device, counting

from .measurement import Counted, Measurement, Times

_PATIENCE = timedelta(seconds=300)  # 10,000 DTensors take torch minutes, once
_HALF = 1e-2  # what rounding may change of a 16-bit gradient, generously
_CALLS = 3  # timed ones in a turn
_TOLD = 160  # characters of a contender's error


@dataclass(frozen=True)
class Settings:
    """What every rank is told.

    Attributes:
        repeats: Timed calls of each contender and kind of step.
        seed: Of the gradients.
        threads: Of each rank.
        turn: Which set of processes this is.
    """

    repeats: int = 9
    seed: int = 0
    threads: int = 1
    turn: int = 0


def run_rank(rank: int, ranks: int, cases: Sequence[Case], settings: Settings, folder: str) -> None:
    """Measure the cases as one of `ranks` processes; rank 0 writes a line for each case."""
    _silence()
    torch.set_num_threads(settings.threads)
    if cases[0].layout != "plain":
        dist.init_process_group(
            "gloo",
            init_method=(Path(folder) / "store").as_uri(),
            rank=rank,
            world_size=ranks,
            timeout=_PATIENCE,
        )
    gc.disable()  # a collection would fall into some calls and not into others
    for case in cases:
        found, absent = measure_case(case, settings)
        if rank == 0:
            line = {"case": case.name, "measured": [asdict(one) for one in found], "absent": absent}
            with (Path(folder) / "measured.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        gc.collect()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _silence() -> None:
    """Keep what the compared packages print, log and warn of away from the tables."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def measure_case(case: Case, settings: Settings) -> tuple[list[Measurement], dict[str, str]]:
    """Time and count every contender of a case; say of the others why they are left out."""
    contenders, absent = present(case)
    try:
        small = build(replace(case, shapes=tiny(case.shapes)), settings.seed)
        failed = _try(contenders, small)
        gradients = build(case, settings.seed)
    except UnavailableError as error:
        return [], {LAYOUTS[case.layout]: str(error)}
    absent |= failed
    contenders = [one for one in contenders if one.name not in failed]
    times = _time_all(contenders, gradients, settings)
    if settings.turn:  # the counts are the same in every round
        counted = dict.fromkeys(times, Counted())
    else:
        counted = {
            (step, one.name): _count(step, one, gradients, small)
            for one in contenders
            for step in one.steps
        }
    measured = [
        Measurement(
            case=case.name,
            step=step,
            contender=one.name,
            does=one.does,
            bytes=int(_largest([gradients.bytes])[0]),
            **vars(counted[step, one.name]),
            **vars(times[step, one.name]),
        )
        for step in STEPS
        for one in contenders
        if step in one.steps
    ]
    return measured, absent


def _try(contenders: Sequence[Contender], gradients: Gradients) -> dict[str, str]:
    """Call each once on small gradients, so that imports and connections are not timed.

    Returns:
        What those raised that cannot do it; they raise on all ranks alike.
    """
    failed = {}
    for contender in contenders:
        gradients.restore()
        try:
            read(contender.make(gradients).clip(gradients.norm))
        except Exception as error:  # whatever another package raises is its answer
            told = " ".join(str(error).split())[:_TOLD]
            failed[contender.name] = f"raises {type(error).__name__}: {told}"
    return failed


def _time_all(
    contenders: Sequence[Contender], gradients: Gradients, settings: Settings
) -> dict[tuple[str, str], Times]:
    drawn = random.Random(f"{settings.seed} {settings.turn}")  # the same order on every rank
    made: dict[str, Clipping] = {}
    times: dict[tuple[str, str], Times] = {}
    # Not in turns: torch's own first, before others that call the same operations have filled its
    # caches. None of ours profits from what torch has done before.
    for contender in contenders:
        first = times.setdefault((FIRST, contender.name), Times())
        made[contender.name] = _time_first(contender, gradients, first)
    for step in (USUAL, CLIPPED):
        max_norm = gradients.norm * HEADROOM[step]
        chosen = [contender for contender in contenders if step in contender.steps]
        gradients.restore()
        renew = gradients.attach if step == USUAL else gradients.restore
        for repeat in range(0, settings.repeats, _CALLS):
            for contender in drawn.sample(chosen, len(chosen)):
                into = times.setdefault((step, contender.name), Times())
                calls = min(_CALLS, settings.repeats - repeat)
                for kept in (Times(), *[into] * calls):
                    renew()
                    _time(made[contender.name], max_norm, kept)
    for held in times.values():
        held.seconds, held.cpu_seconds, held.hidden = (
            _largest(values) for values in (held.seconds, held.cpu_seconds, held.hidden)
        )
    return times


def _time_first(contender: Contender, gradients: Gradients, into: Times) -> Clipping:
    """Time what a new set of gradients costs, and return what clips it from then on."""
    gradients.restore()
    _barrier()
    start, cpu = time.perf_counter(), time.thread_time()
    clipping = contender.make(gradients)
    clipping.backward()
    clipping.clip(gradients.norm * HEADROOM[FIRST])
    into.cpu_seconds.append(time.thread_time() - cpu)
    into.seconds.append(time.perf_counter() - start)
    return clipping


def _time(clipping: Clipping, max_norm: float, into: Times) -> None:
    """Time one call on this rank."""
    start = time.perf_counter()
    clipping.backward()
    into.hidden.append(time.perf_counter() - start)
    _barrier()
    start, cpu = time.perf_counter(), time.thread_time()
    clipping.clip(max_norm)
    into.cpu_seconds.append(time.thread_time() - cpu)
    into.seconds.append(time.perf_counter() - start)


def _count(step: str, contender: Contender, gradients: Gradients, small: Gradients) -> Counted:
    """Count one step, and see that it did what it should."""
    with counting() as building:
        clipping = contender.make(gradients)
    counts, value, reading = _counted(clipping, step, gradients)
    host_syncs: int | None = counts.host_reads
    if contender in OURS:
        _check_scaling(contender, gradients, step)
        host_syncs = None
        if step == USUAL and not contender.only_here:
            with as_on_a_device():
                host_syncs = _counted(contender.make(small), step, small)[0].host_reads
    return Counted(
        counts=Counts(**{key: int(_largest([n])[0]) for key, n in asdict(counts).items()}),
        building=building.collectives,
        reading=reading,
        host_syncs=host_syncs,
        norm_error=abs(value - gradients.norm) / gradients.norm,
    )


def _counted(clipping: Clipping, step: str, gradients: Gradients) -> tuple[Counts, float, int]:
    """Count a call, what it left to the backward pass included; read the norm that it gives."""
    max_norm = gradients.norm * HEADROOM[step]
    if step != FIRST:
        gradients.restore()
        clipping.backward()
        clipping.clip(max_norm)
    gradients.restore()
    with counting(gradients.locals) as counts:
        clipping.backward()
        norm = clipping.clip(max_norm)
    with counting() as reading:
        value = read(norm)
    return counts, value, reading.collectives


def _check_scaling(contender: Contender, gradients: Gradients, step: str) -> None:
    """Raise unless the gradients are what they were, times the coefficient."""
    coefficient = 1.0 if contender.does == "norm" else min(1.0, HEADROOM[step])
    for local, saved in zip(gradients.locals, gradients.saved, strict=True):
        if not torch.allclose(local, saved * coefficient, rtol=_HALF, atol=1e-6):
            raise RuntimeError(
                f"{contender.name}: gradients are not {coefficient} of what they were"
            )


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _largest(values: Sequence[float]) -> list[float]:
    """Take the maximum over the ranks, value by value."""
    largest = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [float(value) for value in largest.tolist()]
