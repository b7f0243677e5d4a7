"""Real text that every machine has: the source files of Python's own standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

_SKIPPED = {"site-packages", "dist-packages", "test", "tests"}
_HELD_OUT = 20  # every 20th file is kept for validation


def standard_library() -> list[Path]:
    """Return the standard library's source files without its tests, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path
        for path in root.rglob("*.py")
        if not _SKIPPED.intersection(path.relative_to(root).parts)
    )


def load_corpus(limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Read the text as bytes.

    Args:
        limit: Number of files to read, None for all (about 11 MB).

    Returns:
        Training and validation text, 1-D uint8 tensors from different files.
    """
    files = standard_library()[:limit]
    held_out = [path for i, path in enumerate(files) if i % _HELD_OUT == _HELD_OUT - 1]
    training = [path for i, path in enumerate(files) if i % _HELD_OUT != _HELD_OUT - 1]
    return _read(training), _read(held_out)


def _read(files: list[Path]) -> Tensor:
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw `count` random windows of `length` + 1 bytes: inputs, and targets one byte later."""
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length + 1)].long()
