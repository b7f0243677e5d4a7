"""A user's strict mypy run over the README's and the guides' snippets, with what was installed."""

import re
import sys
from pathlib import Path

import pytest

from tests.packaging.built import python_with, run
from tests.readme.snippets import README, ROOT, snippets

COMMON = """\
import torch
from torch import Tensor, nn

import shardclip
from shardclip import GradClipper

model: nn.Module
optimizer: torch.optim.Optimizer
batches: list[Tensor]
clipper: GradClipper


def loss_of(model: nn.Module, batch: Tensor) -> Tensor: ...


"""
OWN = {
    "fsdp2": "",
    "fsdp1": "",
    "ddp": """\
from torch.nn.parallel import DistributedDataParallel

assert isinstance(model, DistributedDataParallel)
""",
    "tensor_parallel": """\
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh: DeviceMesh
""",
    "pipeline": """\
from torch.distributed.pipelining import ScheduleGPipe

stage: nn.Module
schedule: ScheduleGPipe
inputs: tuple[Tensor, ...]
target: Tensor
""",
    "experts": """\
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

mesh: DeviceMesh
expert_parameters: set[Tensor]


def backward_and_average(model: nn.Module) -> None: ...


""",
    "alone": "",
}
"""What each setting declares: the types of what tests/readme/settings.py makes."""


GUIDES = ("fsdp1", "ddp", "tensor_parallel", "pipeline", "experts")
PAGES = (
    README,
    *(ROOT / f"docs/{name}.md" for name in ("index", "options", "numerics")),
    *(ROOT / f"docs/guides/{name}.md" for name in GUIDES),
)


def declared(setting: str, code: str) -> str:
    """Write a snippet as a module: what is there already, then the snippet."""
    return COMMON.replace("...\n", "raise NotImplementedError\n") + OWN[setting].replace(
        "...\n", "raise NotImplementedError\n"
    ) + code  # fmt: skip


def strict(tmp_path: Path, *codes: str) -> str:
    for number, code in enumerate(codes):
        (tmp_path / f"snippet_{number}.py").write_text(code)
    python = python_with("wheel")
    # torch's own Tensor.backward has no annotations
    told = ["--strict", "--untyped-calls-exclude=torch", "--config-file="]
    told += ["--python-executable", str(python)]
    return run(sys.executable, "-m", "mypy", *told, *sorted(tmp_path.glob("*.py")), cwd=tmp_path,
               limit_s=800)  # fmt: skip


@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("packaging")
def test_the_snippets_are_well_typed(tmp_path):
    found = [one for page in PAGES for one in snippets(page) if one["setting"] in OWN]
    assert {one["setting"] for one in found} == set(OWN)
    codes = [declared(one["setting"], one["code"]) for one in found]
    # what mypy must find, else it has not seen the installed types
    wrong = declared("fsdp2", "shardclip.clip_grad_norm_(model, max_norm='one')\n")
    with pytest.raises(AssertionError) as told:
        strict(tmp_path, wrong, *codes)
    assert re.search(r'snippet_0.py.*"max_norm".*has incompatible type "str"', str(told.value))
    assert f"Found 1 error in 1 file (checked {1 + len(codes)} source files)" in str(told.value)
