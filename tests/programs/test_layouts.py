"""Each layout's example, as a user starts it."""

import re

import pytest

from tests.programs.starting import ROOT, run_through

FOLDER = ROOT / "examples" / "layouts"
RANKS = {"fsdp1": 2, "fsdp2": 2, "tensor_parallel": 4, "pipeline": 2, "experts": 2}
EVERY_RANK_PRINTS = ("pipeline", "experts")
STEPS = 4
pytestmark = pytest.mark.timeout(900)
CLIPPED = re.compile(r"step (\d): ClipResult\(norm (\S+), clipped by (\S+) to (\S+)\)")


def run(name: str) -> list[tuple[float, ...]]:
    """Run an example; step, norm, coefficient and what was left, as printed, in order of steps."""
    ranks = ["--standalone", "--nproc-per-node", str(RANKS[name])]
    done = run_through("-m", "torch.distributed.run", *ranks, FOLDER / f"{name}.py")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Warning" not in done.stderr, done.stderr
    return sorted(tuple(map(float, found)) for found in CLIPPED.findall(done.stdout))


def test_there_are_no_others():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(RANKS)


@pytest.mark.parametrize("name", [name for name in RANKS if not name.startswith("fsdp")])
def test_it_clips_every_step(name):
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 40
    said = run(name)
    times = RANKS[name] if name in EVERY_RANK_PRINTS else 1
    assert [step for step, *_ in said] == [step for step in range(STEPS) for _ in range(times)]
    assert len({norm for _, norm, *_ in said}) == STEPS  # the same on all ranks that print it
    for _, norm, coef, left in said:
        assert norm > left == 0.5
        assert norm * coef == pytest.approx(0.5, rel=1e-3)


def test_both_fsdp_train_the_same_model_alike():
    said = run("fsdp1")
    assert [step for step, *_ in said] == list(range(STEPS))
    assert all(norm > left == 0.5 for _, norm, _, left in said)
    assert run("fsdp2") == said
    for name in ("fsdp1", "fsdp2"):
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 40
