"""The wheel and torch alone, without numpy, from inside a checkout and from outside."""

import shutil
from pathlib import Path

import pytest

from tests.packaging.built import archives, bare_python, run

pytestmark = [pytest.mark.timeout(1200), pytest.mark.xdist_group("packaging")]

SCRIPT = Path(__file__).with_name("without_numpy.py")
LAUNCHERS = {
    "module": ("python", "-m", "shardclip.launch"),
    "command": ("shardclip-launch",),
}


@pytest.fixture(params=["inside", "outside"])
def where(request, tmp_path: Path) -> Path:
    """A folder with the script: a checkout, whose own ``shardclip`` Python prefers, or another."""
    folder = tmp_path if request.param == "outside" else archives()["wheel"].parent / "tree"
    shutil.copy(SCRIPT, folder / "train.py")
    return folder


def started(where: Path, *command: str) -> str:
    python = bare_python()
    return run(python.parent / command[0], *command[1:], cwd=where)


def used(where: Path) -> Path:
    """The package that a script in this folder finds."""
    tree = where / "shardclip"
    return tree if tree.exists() else bare_python().parents[1]


def test_there_is_no_numpy(tmp_path):
    with pytest.raises(AssertionError, match="No module named 'numpy'"):
        run(bare_python(), "-c", "import numpy", cwd=tmp_path)
    home = run(bare_python(), "-c", "import shardclip; print(shardclip.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(bare_python().parents[1])


def test_one_rank(where: Path, tmp_path: Path):
    said = started(where, "python", "train.py", str(tmp_path / "run.jsonl"))
    assert f"rank 0 of 1 with {used(where)}" in said


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks(launcher: str, where: Path, tmp_path: Path):
    words = ["run", "-n", "2", "train.py", str(tmp_path / "run.jsonl")]
    said = started(where, *LAUNCHERS[launcher], *words)
    assert f"rank 0 of 2 with {used(where)}" in said


def test_the_preflight(where: Path):
    said = started(where, *LAUNCHERS["module"], "check", "-n", "2")
    assert "sharded equals single process" in said
    assert "FAULT" not in said


def test_the_command_says_what_a_picture_needs(tmp_path: Path):
    with pytest.raises(AssertionError, match="matplotlib is not installed: pip install"):
        run(bare_python().parent / "shardclip", "plot", "run.jsonl", cwd=tmp_path)


def test_in_a_checkout_the_launcher_comes_once(tmp_path: Path):
    """By one name, and as the only thing beside the package that its name leads to."""
    code = (
        "import importlib.util, sys, shardclip.launch.cli as cli;"
        "assert 'launch' not in sys.modules and 'torch' not in sys.modules;"
        "assert importlib.util.find_spec('shardclip.tests') is None;"
        "print(cli.__file__)"
    )
    tree = archives()["wheel"].parent / "tree"
    said = run(bare_python(), "-c", code, cwd=tree)
    assert said.strip() == str(tree / "launch" / "cli.py")
