"""What the kernel tells of another process."""

import re
from pathlib import Path


def status_of(pid: int, field: str) -> str:
    """Read a field of the process's status, such as ``PPid``."""
    text = Path(f"/proc/{pid}/status").read_text()
    return re.search(rf"^{field}:\s+(\w+)", text, re.MULTILINE)[1]


def has_signal(pid: int, field: str, number: int) -> bool:
    """Tell whether a signal is in one of the process's masks, such as ``SigCgt``."""
    return bool(int(status_of(pid, field), 16) >> (number - 1) & 1)
