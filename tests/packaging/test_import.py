import subprocess
import sys

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
    assert set(dir(shardclip)) == set(shardclip.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'clip_everything'"):
        _ = shardclip.clip_everything


def test_optional_frameworks_stay_unloaded():
    code = (
        "import sys, torch, shardclip; shardclip.get_total_norm([torch.ones(2)]);"
        "print([m for m in ('deepspeed', 'torch.distributed.fsdp', 'triton') if m in sys.modules])"
    )
    assert run(code) == "[]"
