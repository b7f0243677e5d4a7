"""What a user installs: what it holds, what it needs, and that the README's first snippet runs."""

import email
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tests.packaging.built import KINDS, ROOT, VERSION, archives, python_with, run
from tests.readme.snippets import README, snippets

pytestmark = [pytest.mark.timeout(1200), pytest.mark.xdist_group("packaging")]

SCRIPT = """\
import importlib.util
import os
import sys

import torch.distributed as dist

import shardclip

assert shardclip.__file__.startswith(sys.prefix), shardclip.__file__
spec = importlib.util.spec_from_file_location("settings", {settings!r})
settings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(settings)
dist.init_process_group("gloo")
found = settings.{setting}()
exec({code!r}, found)
assert float(found["result"].total_norm) > 1
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # torch's threads may abort a Python that ends: see tests/aborts.py
"""


def wheel_files() -> list[str]:
    return zipfile.ZipFile(archives()["wheel"]).namelist()


def metadata() -> Message:
    with zipfile.ZipFile(archives()["wheel"]) as wheel:
        name = f"shardclip-{VERSION}.dist-info/METADATA"
        return email.message_from_bytes(wheel.read(name))


def test_the_wheel_holds_the_package_and_nothing_else():
    files = wheel_files()
    tops = {name.split("/")[0] for name in files}
    assert tops == {"shardclip", f"shardclip-{VERSION}.dist-info"}
    assert not [name for name in files if "test" in name.lower()]
    assert "shardclip/py.typed" in files
    assert f"shardclip-{VERSION}.dist-info/licenses/LICENSE" in files


def test_no_file_is_left_behind():
    """Packages are listed by hand: a new one must be among them."""
    homes = {"shardclip": ROOT / "shardclip", "shardclip/launch": ROOT / "launch"}
    expected = {
        f"{prefix}/{path.relative_to(home).as_posix()}"
        for prefix, home in homes.items()
        for path in home.rglob("*.py")
    }
    assert {name for name in wheel_files() if name.endswith(".py")} == expected


def test_only_torch_is_needed():
    needed = metadata().get_all("Requires-Dist") or []
    assert [one for one in needed if "extra ==" not in one] == ["torch>=2.8"]


def test_the_version_stands_in_one_place():
    assert metadata()["Version"] == VERSION
    assert archives()["sdist"].name == f"shardclip-{VERSION}.tar.gz"
    code = "import shardclip; print(shardclip.__version__)"
    python = python_with("wheel")
    assert run(python, "-c", code, cwd=python.parents[1]).strip() == VERSION


def test_the_sdist_has_what_the_wheel_is_built_from():
    with tarfile.open(archives()["sdist"]) as sdist:
        names = {name.split("/", 1)[-1] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "launch/cli.py", "shardclip/py.typed"} <= names


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_snippet_runs_in_an_empty_environment(kind: str, tmp_path: Path):
    python, first = python_with(kind), snippets(README)[0]
    settings = str(ROOT / "tests" / "readme" / "settings.py")
    script = tmp_path / "first.py"
    script.write_text(
        SCRIPT.format(settings=settings, setting=first["setting"], code=first["code"])
    )
    ranks = ["--standalone", "--nproc-per-node", first["ranks"]]
    printed = run(python, "-m", "torch.distributed.run", *ranks, script, cwd=tmp_path)
    assert printed.count("ClipResult(norm ") == int(first["ranks"])
    assert "clipped by" in printed


@pytest.mark.parametrize("command", ["shardclip", "shardclip-launch"])
def test_commands_are_installed(command: str):
    python = python_with("wheel")
    said = run(python.parent / command, "--help", cwd=python.parents[1])
    assert said.startswith(f"usage: {command}")
