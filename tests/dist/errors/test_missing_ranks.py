"""A rank that never calls: the others' error names it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shardclip import GradClipper, clip_grad_norm_, compat
from tests.ranks.pool import CALL_LIMIT_S, RankPool

RANKS = 3
MISSING = 1
HOW = ("clipper", "function", "building")
pytestmark = pytest.mark.xdist_group("missing ranks")  # they wait together


def said(how: str) -> str:
    made = torch.nn.Parameter(torch.ones(3))
    made.grad = torch.ones(3)
    named = [("w", made)]
    dist.barrier()  # all are here: they can meet in time
    group = dist.new_group(timeout=timedelta(seconds=5))  # torch 2.8 changes no group's time-out
    clipper = GradClipper(named, 1.0, group=group)
    clipper.clip_()
    calls = {
        "clipper": clipper.clip_,
        "function": lambda: clip_grad_norm_([made], 1.0, group=group),
        "building": lambda: GradClipper(named, 1.0, group=group),
    }
    store = compat.default_store()
    if dist.get_rank() == MISSING:
        others = [f"{rank} has said" for rank in range(RANKS) if rank != MISSING]
        store.wait(others, timedelta(seconds=CALL_LIMIT_S / 2))
        return "did not call"
    try:
        calls[how]()
    except RuntimeError as error:
        return str(error)
    finally:
        store.set(f"{dist.get_rank()} has said", "")
    return "nothing raised"


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, list[str]]]:
    """What each rank says; for each way to call ranks of its own, whose group is of no use after.

    Most of it is waiting for the missing one, so that all three wait at once.
    """
    with ExitStack() as ends, ThreadPoolExecutor(len(HOW)) as threads:
        calls = {}
        for how in HOW:
            pool = RankPool(RANKS)
            ends.callback(pool.close)
            calls[how] = threads.submit(pool.call, said, (how,), {}, CALL_LIMIT_S)
        yield {how: call.result() for how, call in calls.items()}


@pytest.mark.parametrize("how", HOW)
def test_the_missing_rank_is_named(told: dict[str, list[str]], how: str):
    texts = list(told[how])
    assert texts.pop(MISSING) == "did not call"
    for text in texts:
        assert "rank(s) 1 of 3 did not take part" in text, text
        assert "The backend said:" in text
