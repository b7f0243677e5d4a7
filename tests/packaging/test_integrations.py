"""A framework that is missing or too old: one clear error, which names the extra to install."""

import importlib
import sys
import types
from importlib import metadata

import pytest

EXTRAS = ["accelerate", "lightning", "transformers"]


@pytest.fixture
def installed(monkeypatch):
    """Pretend that these versions are installed, and no other framework."""

    def pretend(**versions: str) -> None:
        for name in EXTRAS:
            present = types.ModuleType(name) if name in versions else None
            monkeypatch.setitem(sys.modules, name, present)
            monkeypatch.delitem(sys.modules, f"shardclip.integrations.{name}", raising=False)
        monkeypatch.setattr(metadata, "version", versions.__getitem__)

    return pretend


@pytest.mark.parametrize("extra", EXTRAS)
def test_missing(extra, installed):
    installed(**({"accelerate": "1.15.0"} if extra == "transformers" else {}))
    with pytest.raises(ImportError, match=rf"{extra} .*pip install .*'{extra}>="):
        importlib.import_module(f"shardclip.integrations.{extra}")


@pytest.mark.parametrize("extra", EXTRAS)
def test_too_old(extra, installed):
    installed(**{"accelerate": "1.15.0", extra: "0.9.1"})
    with pytest.raises(ImportError, match=rf"{extra} 0.9.1 is too old.*pip install .*'{extra}>="):
        importlib.import_module(f"shardclip.integrations.{extra}")


def test_the_package_itself_needs_none_of_them(installed):
    installed()
    assert importlib.import_module("shardclip.integrations")
