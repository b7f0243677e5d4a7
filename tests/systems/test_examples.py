"""Each loop's example, as a user starts it, on two ranks."""

import re
from pathlib import Path

import pytest

from tests.programs.starting import ROOT, run_through

EXAMPLES = sorted((ROOT / "examples").glob("*_loop.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CLIPPED = re.compile(r"ClipResult\(norm (\S+), clipped by (\S+) to (\S+)\)")


def test_there_is_one_for_each_loop():
    names = {path.stem.removesuffix("_loop") for path in EXAMPLES}
    assert names == {"plain", "accelerate", "deepspeed", "trainer", "lightning", "fabric"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_and_clips(example: Path):
    assert len(example.read_text().splitlines()) <= 40
    done = run_through(*TORCHRUN, example)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = [tuple(map(float, match)) for match in CLIPPED.findall(done.stdout + done.stderr)]
    assert found, done.stdout[-2000:]
    for norm, factor, left in found:
        assert left in {0.5, 0.1}
        assert norm > left
        assert norm * factor == pytest.approx(left, rel=1e-3)
