"""A framework that is missing or too old: one clear error."""

import sys
from importlib import metadata

import pytest

from shardclip import GradClipper, extras


def test_a_missing_framework_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r"pip install 'shardclip\[deepspeed\]'"):
        GradClipper.from_deepspeed(object(), max_norm=1.0)


@pytest.mark.parametrize("version, fits", [("8.9.1", False), ("9.0rc1", True), ("10.0+cpu", True)])
def test_an_old_one_too(monkeypatch, version, fits):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    if fits:
        assert extras.require("pytest", "9.0", extra="testing") is pytest
    else:
        with pytest.raises(ImportError, match=rf"{version} is too old, 9\.0 or newer.*\[testing\]"):
            extras.require("pytest", "9.0", extra="testing")
