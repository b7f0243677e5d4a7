"""A program that loads what it clips with inside DDP's ``join()``, where one rank is soon gone."""

import re

import pytest

from .starting import run

pytestmark = pytest.mark.timeout(900)
PROGRAM = """
import torch, torch.distributed as dist, torch.nn as nn
import shardclip  # its names are loaded when they are first used

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
with model.join():
    for step in range(3 if rank == 0 else 5):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        norm = shardclip.clip_grad_norm_(model.parameters(), 1.0)
        print(f"rank {rank} step {step} norm {float(norm):.6f}", flush=True)
model.zero_grad()
with model.no_sync():
    (model(torch.ones(2, 4)).sum() * (1 + rank)).backward()
try:
    shardclip.clip_grad_norm_(model.parameters(), 1.0)
except shardclip.ReplicaMismatchError:
    print(f"rank {rank} has proved its copies again", flush=True)
dist.destroy_process_group()
"""


def test_it_comes_to_its_end(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    ranks = ["--standalone", "--nproc-per-node", "2"]
    printed = run("-m", "torch.distributed.run", *ranks, str(path))  # lines may run together
    found = re.findall(r"rank (\d) step (\d) norm (\d+\.\d{6})", printed)
    # 20 numbers with a gradient of 2, averaged over two ranks; then over one and a zero
    expected = [(r, k, "8.944272") for r in "01" for k in "012"]
    assert sorted(found) == expected + [("1", k, "4.472136") for k in "34"]
    assert printed.count("has proved its copies again") == 2
