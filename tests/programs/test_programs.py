"""The demo and the benchmark, small, as a user starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    assert max(len(line) for line in printed.splitlines()) <= 80


def test_benchmark_counts_collectives(tmp_path):
    """Counts are gated; times never are."""
    printed = run("-m", "benchmarks", "--quick", "--out", str(tmp_path / "rows.jsonl"))
    rows = records(tmp_path / "rows.jsonl")
    ours = [row for row in rows if row["contender"] != "torch"]
    assert {row["case"] for row in ours} == {"fsdp2-layers", "fsdp2-small", "hsdp", "one-process"}
    for row in ours:
        expected = 0 if row["case"] == "one-process" else 1
        assert row["all_reduces"] == row["collectives"] == expected, row
        assert row["norm_error"] < 1e-6, row
    assert "ratio to torch" in printed
    table = [line for line in printed.splitlines() if str(tmp_path) not in line]
    assert max(len(line) for line in table) <= 80
