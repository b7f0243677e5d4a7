"""A framework that is missing or too old: one clear error."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from shardclip import GradClipper, extras


def test_a_missing_framework_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match="pip install 'deepspeed>="):
        GradClipper.from_deepspeed(object(), max_norm=1.0)


def test_the_command_has_all_packages_of_an_extra():
    command = extras.command("transformers")
    assert command == "pip install 'accelerate>=1.10' 'transformers>=5.0'"


def test_a_checkout_that_is_not_installed_installs_from_there(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert extras.command("plot") == "pip install '.[plot]'"


def test_no_page_names_an_index_that_has_no_shardclip():
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    assert not [page.name for page in pages if "pip install 'shardclip[" in page.read_text()]


@pytest.mark.parametrize("version, fits", [("8.9.1", False), ("9.0rc1", True), ("10.0+cpu", True)])
def test_an_old_one_too(monkeypatch, version, fits):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    if fits:
        assert extras.require("pytest", "9.0", extra="testing") is pytest
    else:
        with pytest.raises(
            ImportError, match=rf"{version} is too old, 9\.0 or newer.*\.\[testing\]"
        ):
            extras.require("pytest", "9.0", extra="testing")
