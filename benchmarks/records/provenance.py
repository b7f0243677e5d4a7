"""What a record was made with."""

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

import shardclip

from .files import HERE, Row

_PACKAGES = ("accelerate", "torchtitan", "deepspeed", "triton")


def machine() -> Row:
    """Describe what a record was made with: time, commit, versions, machine and how busy it is."""
    versions = {name: _version(name) for name in _PACKAGES}
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "shardclip": shardclip.__version__,
        "torch": torch.__version__,
        "packages": {name: version for name, version in versions.items() if version},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "gpu": cuda,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the checkout's commit, with a plus where tracked files differ from it."""
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(HERE), *command], capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changes else "")


def _processor() -> str:
    """Return the processor's name; Linux tells it only in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
