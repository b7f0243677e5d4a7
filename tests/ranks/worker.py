"""A rank's own side of the pool: joins the group, runs what it is sent till the pipe closes."""

import faulthandler
import importlib
import operator
import os
import pickle
import re
import signal
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest  # noqa: F401 - imported once for all ranks, as are the modules below
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

TESTS = str(Path(__file__).resolve().parents[1])
COLLECTIVE_LIMIT = timedelta(seconds=120)  # of a call's 200: ranks may be slow to import
VALUE_LENGTH = 300
NOT_OURS = ["Guards may run slower on Python 3.13.0"]  # torch.compile, on that very Python
if torch.__version__.startswith("2.8."):
    # whenever an FSDP1 module is collected, in whichever test that may be
    NOT_OURS.append("Deallocating Tensor that still has live PyObject references")


def main(pipe: Connection, rank: int, world_size: int, store: str, log: str) -> None:
    """Be this rank; the process is new and has nothing but imported modules."""
    _write_to(log)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_LIMIT,
    )
    pipe.send_bytes(pickle.dumps(("returned", None)))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:  # the parent is gone or done
            return
        pipe.send_bytes(answer(request))


def _write_to(log: str) -> None:
    """Send stdout and stderr, also C++'s, to a file."""
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def answer(request: bytes) -> bytes:
    """The pickled result, or the traceback as text."""
    try:
        module, name, args, kwargs = pickle.loads(request)
        function = operator.attrgetter(name)(importlib.import_module(module))
        function = getattr(function, "body", function)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for message in NOT_OURS:
                warnings.filterwarnings("ignore", re.escape(message))
            return pickle.dumps(("returned", function(*args, **kwargs)))
    except BaseException as error:  # pytest's outcomes are no Exceptions
        return pickle.dumps(("raised", describe(error)))


def describe(error: BaseException) -> str:
    """A traceback that shows the values of the tests' own variables, cut short."""
    report = traceback.TracebackException.from_exception(error, capture_locals=True)
    for frame in report.stack:
        ours = frame.filename.startswith(TESTS) and frame.filename != __file__
        shown = (frame.locals or {}) if ours else {}
        frame.locals = {name: text[:VALUE_LENGTH] for name, text in shown.items()} or None
    return "".join(report.format())
