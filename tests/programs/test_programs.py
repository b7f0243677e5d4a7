"""The demo, small, as a user starts it."""

import pytest

from shardclip.cli import main
from shardclip.record.run_file import read
from tests.programs.starting import run, widest

pytestmark = pytest.mark.timeout(900)


def test_demo(tmp_path, capsys):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    small = ["--steps", "6", "--files", "60", "--checks", "2", "--max-norm", "0.1"]
    (tmp_path / "clipped.jsonl").write_text('{"step": 1, "total_norm": 9}\n')  # an earlier demo's
    printed = run(*torchrun, "examples/train_lm.py", *small, "--out", str(tmp_path))
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "report.html").read_text()
    paths = [tmp_path / f"{name}.jsonl" for name in ("unclipped", "clipped")]
    unclipped, clipped = map(read, paths)
    for found in (unclipped, clipped):
        assert [step.step for step in found.steps] == [1, 2, 3, 4, 5, 6]
        assert not found.notes
        assert {"embedding", "blocks.0.qkv"} <= set(found.steps[0].norms)
    assert unclipped.steps[0].sums == clipped.steps[0].sums
    assert unclipped.steps[0].total_norm == clipped.steps[0].total_norm
    assert all(step.total_norm == step.clipped_norm for step in unclipped.steps)
    assert all(step.clipped_norm == pytest.approx(0.1, rel=1e-4) for step in clipped.steps)
    assert "norm against the gathered gradients" in printed
    assert widest(printed, tmp_path) <= 80
    assert main(["plot", *map(str, paths), "-o", str(tmp_path / "plot.png")]) == 0
    capsys.readouterr()
