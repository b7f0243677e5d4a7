"""Each loop's example, as a user starts it, on two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(example)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = [tuple(map(float, match)) for match in CLIPPED.findall(done.stdout + done.stderr)]
    assert found, done.stdout[-2000:]
    for norm, factor, left in found:
        assert left in {0.5, 0.1}
        assert norm > left
        assert norm * factor == pytest.approx(left, rel=1e-3)
