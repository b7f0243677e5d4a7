"""In a checkout the launcher lies beside this folder; there, too, it is ``shardclip.launch``.

Python prefers the checkout's folder ``shardclip`` to an installed package wherever it is started in
the checkout, and an installed package has the launcher inside.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

_NAME = f"{__package__}.launch"
_FOLDER = Path(__file__).resolve().parents[1] / "launch"


class _Finder(MetaPathFinder):
    """Finds the launcher's package, and nothing else."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Tell where the launcher lies; None for everything else."""
        if fullname != _NAME:
            return None
        inside = [str(_FOLDER)]
        return spec_from_file_location(
            fullname, _FOLDER / "__init__.py", submodule_search_locations=inside
        )


if (_FOLDER / "__init__.py").is_file() and (_FOLDER.parent / "pyproject.toml").is_file():
    sys.meta_path.append(_Finder())
