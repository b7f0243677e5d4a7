"""Every public name is imported from its documented place, and torch only where it is used."""

import subprocess
import sys
from pathlib import Path

import pytest

import shardclip


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_shardclip_does_not_import_torch():
    assert run("import sys, shardclip; print('torch' in sys.modules)") == "False"


def test_every_public_name_is_there():
    for name in shardclip.__all__:
        assert getattr(shardclip, name) is not None
    assert set(shardclip.__all__) <= set(dir(shardclip))


LIGHT = ("integrations", "launch", "logging", "outcome", "pictures", "run_file")
NAMES = {  # what users import from modules; the light ones import no torch
    "adapters": ("megatron", "torchtitan", "zero_redundancy"),
    "adapters.megatron": ("layout", "read"),
    "adapters.torchtitan": ("layout",),
    "adapters.zero_redundancy": ("layout",),
    "adaptive": ("AutoClip", "LinearWarmup", "RunningMean", "Threshold", "ZClip"),
    "launch": ("Placement", "StopSignal", "detect", "init_distributed"),
    "logging": (
        *("JsonLines", "MLflow", "Sink", "StandardLogging", "TensorBoard", "WeightsAndBiases"),
    ),
    "outcome": ("Outcome",),
    "record": ("Record",),
    "run_file": ("Run", "read"),
}


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_is_imported_either_way_without_torch(module):
    for said in (f"import shardclip; shardclip.{module}", f"import shardclip.{module}"):
        assert run(f"import sys; {said}; print('torch' in sys.modules)") == "False"


def test_every_documented_name_comes_from_its_place():
    lines = [f"from shardclip import {', '.join(shardclip.__all__)}"]
    lines += [f"from shardclip.{module} import {', '.join(NAMES[module])}" for module in NAMES]
    assert run("; ".join([*lines, "print('there')"])) == "there"


def test_a_module_is_an_attribute_as_well():
    said = "; ".join(f"shardclip.{module}" for module in NAMES if "." not in module)
    assert run(f"import shardclip; {said}; print('there')") == "there"


@pytest.mark.parametrize("name", ["GradClipper", "clip_grad_norm_", "SELF", "ClipResult"])
def test_a_public_name_may_be_the_first_import(name):
    assert run(f"from shardclip import {name}; print('there')") == "there"


def test_the_pages_of_the_api_name_nothing_else():
    pages = (Path(__file__).parents[2] / "docs/api").glob("*.md")
    told = {line.removeprefix("::: ") for page in pages for line in page.read_text().splitlines()
            if line.startswith("::: shardclip")}  # fmt: skip
    known = {f"shardclip.{name}" for name in shardclip.__all__}
    known |= {f"shardclip.{module}.{name}" for module in NAMES for name in NAMES[module]}
    known |= {f"shardclip.{module}" for module in NAMES}
    assert {name for name in told if not name.startswith("shardclip.integrations.")} <= known


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'clip_everything'"):
        _ = shardclip.clip_everything


def test_optional_frameworks_stay_unloaded():
    code = (
        "import sys, torch, shardclip; shardclip.get_total_norm([torch.ones(2)]);"
        "print([m for m in ('deepspeed', 'torch.distributed.fsdp', 'triton') if m in sys.modules])"
    )
    assert run(code) == "[]"
