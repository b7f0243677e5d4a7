"""Frameworks that are optional: imported when used, with one clear error where that fails."""

import importlib
import re
from importlib import metadata
from types import ModuleType


def require(
    module: str, oldest: str | None = None, *, extra: str, distribution: str | None = None
) -> ModuleType:
    """Import a framework, or say how to get it.

    Args:
        module: What is imported.
        oldest: The oldest version that will do; None: any, whatever distribution it comes from.
        extra: The name of shardclip's extra that installs it.
        distribution: What the package is called where it is installed from, if not like the module.

    Raises:
        ImportError: It is missing or too old; names the extra.
    """
    name = distribution or module
    mend = f"install it with: {command(extra)}"
    try:
        found = importlib.import_module(module)
        version = metadata.version(name) if oldest else None
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise ImportError(f"{name} is needed here and cannot be imported; {mend}") from error
    if oldest and version and _numbers(version) < _numbers(oldest):
        raise ImportError(f"{name} {version} is too old, {oldest} or newer is needed; {mend}")
    return found


def command(extra: str) -> str:
    """Return the command that installs an extra's packages, wherever shardclip came from."""
    pattern = re.compile(rf"([^;]+?) *; *extra *== *['\"]{re.escape(extra)}['\"]")
    try:
        needs = metadata.requires("shardclip") or []
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        needs = []
    found = [match[1] for match in map(pattern.fullmatch, needs) if match]
    return "pip install " + (" ".join(f"'{need}'" for need in found) or f"'.[{extra}]'")


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's leading numbers: "2.13.0+cpu" gives (2, 13, 0)."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading.group().split(".")) if leading else ()
