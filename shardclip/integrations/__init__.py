"""Host training loops: the loop keeps its lines, shardclip does the clipping.

Each file belongs to one framework and imports it; nothing here is imported before it is asked for.
"""

import importlib.metadata
import re


def require(package: str, minimum: str) -> None:
    """Check that a framework is there and new enough.

    Args:
        package: Its distribution's name, which is also the name of the extra.
        minimum: The oldest version that will do: numbers and dots.

    Raises:
        ImportError: It is missing or too old; says which version there is and what to install.
    """
    mend = f"pip install 'shardclip[{package}]'"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        text = f"shardclip.integrations.{package} needs {package}, which is not installed: {mend}"
        raise ImportError(text, name=package) from None
    if _numbers(found) < _numbers(minimum):
        raise ImportError(
            f"shardclip.integrations.{package} needs {package} >= {minimum}, found {found}: {mend}",
            name=package,
        )


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, leading.group().split("."))) if leading else ()
