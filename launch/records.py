"""Files in the run's directory by which ranks, launchers and batch script tell each other."""

import os
from pathlib import Path

from . import variables as names
from .failure import Failure


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def record_notice(name: str) -> None:
    """Leave the stop file, with the signal's name: for ranks, and for the batch script's end."""
    path = os.environ.get(names.STOP_FILE)
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a") as file:
            file.write(f"{name}\n")


def record_locally(failure: Failure) -> bool:
    """Record a failure unless one was recorded before; tells whether this one is the first.

    The batch script exits with the recorded code.
    """
    directory = os.environ.get(names.RUN_DIR)
    if not directory:
        return True
    target = Path(directory) / "first-failure"
    part = target.with_name(f".first-failure.{failure.host}.{failure.rank}.{os.getpid()}")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(failure.dumps())
    try:
        # link() fails where the name exists, on network file systems too
        os.link(part, target)
    except FileExistsError:
        return False
    finally:
        part.unlink()
    record_exit_code(failure.code)
    return True


def record_exit_code(code: int) -> None:
    """Leave the code with which the batch script is to exit."""
    directory = os.environ.get(names.RUN_DIR)
    if directory:
        write_whole(Path(directory) / "exit-code", f"{code}\n")
