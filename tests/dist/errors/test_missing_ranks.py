"""A rank that never calls: the others' error names it."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardclip import GradClipper, clip_grad_norm_, compat
from tests.ranks.pool import CALL_LIMIT_S, RankPool

RANKS = 3
MISSING = 1


def said(how: str) -> str:
    made = torch.nn.Parameter(torch.ones(3))
    made.grad = torch.ones(3)
    named = [("w", made)]
    clipper = GradClipper(named, 1.0)
    clipper.clip_()
    calls = {
        "clipper": clipper.clip_,
        "function": lambda: clip_grad_norm_([made], 1.0),
        "building": lambda: GradClipper(named, 1.0),
    }
    _set_pg_timeout(timedelta(seconds=3))  # now that all are here
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


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Ranks of its own: their group is of no use after this."""
    made = RankPool(RANKS)
    yield made
    made.close()


@pytest.mark.parametrize("how", ["clipper", "function", "building"])
def test_the_missing_rank_is_named(pool: RankPool, how: str):
    told = pool.call(said, (how,), {}, CALL_LIMIT_S)
    assert told.pop(MISSING) == "did not call"
    for text in told:
        assert "rank(s) 1 of 3 did not take part" in text, text
        assert "The backend said:" in text
