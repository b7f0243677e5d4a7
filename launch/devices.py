"""What this host has to compute with: its devices, and the CPUs of this process's mask."""

import os
import re
from collections.abc import Mapping
from pathlib import Path


def count_devices(environ: Mapping[str, str]) -> int:
    """Count the accelerators that ranks will see, without importing torch."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() and d.strip() != "-1"])
    try:
        return len([p for p in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", p.name)])
    except OSError:
        return 0


def cpus() -> int:
    """Count the CPUs in this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(available: int, ranks: int) -> int:
    """Return OMP_NUM_THREADS for each of the ranks that share the CPUs."""
    return max(1, available // ranks)


def shared_core_warning(available: int, ranks: int) -> str | None:
    """Say so where ranks outnumber the CPUs they may use."""
    if ranks <= available:
        return None
    return (
        f"{ranks} ranks share {available} CPU{'s' if available != 1 else ''}, so some share a "
        "core; under Slurm ask for more with --cpus-per-task"
    )
