"""The wheel and the sdist, built once, and empty environments that see torch to install them in."""

import os
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from tempfile import mkdtemp

from tests import aborts

ROOT = Path(__file__).parents[2]
VERSION = "9.8.7"  # written into the copy's one place, and expected everywhere
KINDS = ("wheel", "sdist")
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "shardclip-runs")


def run(*command: str | Path, cwd: Path, limit_s: float = 400) -> str:
    """Run a command away from the checkout; what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = aborts.run_through(
        lambda: subprocess.run(
            command,
            cwd=cwd,
            env=environment | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def build(folder: Path) -> dict[str, Path]:
    """Build both from a copy of the checkout, the wheel from the sdist."""
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
    version = f'"""The version."""\n\n__version__ = "{VERSION}"\n'
    (tree / "shardclip" / "_version.py").write_text(version)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree, cwd=folder)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


def environment(folder: Path, archive: Path) -> Path:
    """Install an archive into an empty environment; its Python.

    What the running environment has is visible there, after the environment's own packages, except
    what is installed as editable: a .pth file in a folder that a .pth file names is not read.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))",
                   cwd=folder).strip())  # fmt: skip
    seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (own / "running.pth").write_text("\n".join(seen))
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
        "--no-build-isolation", "--ignore-installed", archive, cwd=folder)  # fmt: skip
    return python


def bare(folder: Path, archive: Path) -> Path:
    """Install an archive into an environment with torch, what torch cannot do without, and no more.

    They are links to the running environment's, so that nothing is downloaded.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))",
                   cwd=folder).strip())  # fmt: skip
    for name in _needed("torch"):
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (own / top).exists():
                (own / top).symlink_to(Path(found.locate_file(top)).resolve())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index",
        "--no-deps", archive, cwd=folder)  # fmt: skip
    return python


def _needed(name: str) -> set[str]:
    """Name a distribution and all that it cannot do without, as far as it is installed."""
    names: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop().lower()
        try:
            needs = metadata.requires(one) or []
        except metadata.PackageNotFoundError:  # for another system or Python
            continue
        if one not in names:
            names.add(one)
            waiting += [re.match(r"[\w.-]+", need)[0] for need in needs if "extra ==" not in need]
    return names


@lru_cache(maxsize=1)
def archives() -> dict[str, Path]:
    """Build both, once."""
    return build(Path(mkdtemp(prefix="shardclip-built-")))


@lru_cache(maxsize=len(KINDS))
def python_with(kind: str) -> Path:
    """Return the Python of an environment that has what was built."""
    return environment(archives()["wheel"].parent / f"env-{kind}", archives()[kind])


@lru_cache(maxsize=1)
def bare_python() -> Path:
    """Return the Python of an environment that has the wheel, torch, and not even numpy."""
    return bare(archives()["wheel"].parent / "env-bare", archives()["wheel"])


def remove() -> None:
    """Remove what was built."""
    if archives.cache_info().currsize:
        shutil.rmtree(archives()["wheel"].parent)
    archives.cache_clear()
    python_with.cache_clear()
    bare_python.cache_clear()
