"""The demo, small, as a user starts it."""

import pytest

from tests.programs.starting import records, run, widest

pytestmark = pytest.mark.timeout(900)


def test_demo(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    small = ["--steps", "6", "--files", "60", "--checks", "2", "--max-norm", "0.1"]
    printed = run(*torchrun, "examples/train_lm.py", *small, "--out", str(tmp_path))
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    steps = records(tmp_path / "metrics.jsonl")
    by_run = {name: [s for s in steps if s["run"] == name] for name in ("unclipped", "clipped")}
    assert [len(found) for found in by_run.values()] == [6, 6]
    assert by_run["unclipped"][0]["loss"] == by_run["clipped"][0]["loss"]
    assert by_run["unclipped"][0]["total_norm"] == by_run["clipped"][0]["total_norm"]
    same = [
        pytest.approx(s["total_norm"], rel=1e-6) == s["clipped_norm"] for s in by_run["unclipped"]
    ]
    assert all(same)
    assert all(s["clipped_norm"] == pytest.approx(0.1, rel=1e-4) for s in by_run["clipped"])
    assert "norm against the gathered gradients" in printed
    assert widest(printed, tmp_path) <= 80
