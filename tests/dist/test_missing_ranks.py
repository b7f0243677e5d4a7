"""A rank that never calls: the others' error names it."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardclip import GradClipper, clip_grad_norm_, roll_call

RANKS = 3


def _rank(rank: int, folder: str, how: str) -> None:
    roll_call.PATIENCE = 2.0
    dist.init_process_group(
        "gloo",
        init_method=(Path(folder) / "store").as_uri(),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=3),
    )
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
    said = "did not call"
    if rank != 1:
        try:
            calls[how]()
            said = "nothing raised"
        except RuntimeError as error:
            said = str(error)
    else:
        import time

        time.sleep(8)
    (Path(folder) / f"said{rank}").write_text(said)


def _told(tmp_path, how: str) -> list[str]:
    mp.spawn(_rank, args=(str(tmp_path), how), nprocs=RANKS)
    return [(tmp_path / f"said{rank}").read_text() for rank in range(RANKS)]


def test_the_missing_rank_is_named(tmp_path):
    said = _told(tmp_path, "clipper")
    for rank in (0, 2):
        assert "rank(s) 1 of 3 did not take part" in said[rank], said[rank]
        assert "The backend said:" in said[rank]


@pytest.mark.parametrize("how", ["function", "building"])
def test_by_the_functions_and_while_one_is_built_too(tmp_path, how):
    said = _told(tmp_path, how)
    for rank in (0, 2):
        assert "rank(s) 1 of 3 did not take part" in said[rank], said[rank]
