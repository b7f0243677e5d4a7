"""Python imports this before a rank's script: a notice waits until the script listens to it.

The guard starts the rank with its notices ignored, and this folder first in PYTHONPATH, where
Python looks for a module of this name. Left ignored they would be so in every program that the
rank starts. So here a handler takes over: exec drops it, and forked children do.
"""

import _thread
import atexit
import ctypes
import os
import signal
import sys
import time
from types import FrameType

_POLL = 0.2


class _Held:
    """Holds signals back until the script sets their handlers."""

    def __init__(self, numbers: list[int]) -> None:
        self._waiting: set[int] = set()
        self._numbers = numbers
        # what Python itself does not know of: handlers set in C, such as faulthandler's
        self._in_c = ctypes.pythonapi.PyOS_getsig
        self._in_c.restype = ctypes.c_void_p
        for number in numbers:
            signal.signal(number, self._hold)
            signal.siginterrupt(number, False)
        self._own = {number: self._in_c(number) for number in numbers}
        os.register_at_fork(after_in_child=self._in_child)
        atexit.register(self._at_exit)

    def _is_held(self, number: int) -> bool:
        own = signal.getsignal(number) == self._hold
        return own and self._in_c(number) == self._own[number]

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if number not in self._waiting:
            self._waiting.add(number)
            _thread.start_new_thread(self._pass_on, (number,))

    def _pass_on(self, number: int) -> None:
        while self._is_held(number):
            time.sleep(_POLL)
        self._waiting.discard(number)
        os.kill(os.getpid(), number)

    def _in_child(self) -> None:
        self._release(signal.SIG_DFL)

    def _at_exit(self) -> None:
        # Python, ending, gives signals their default: death
        self._release(signal.SIG_IGN)

    def _release(self, to: signal.Handlers) -> None:
        for number in filter(self._is_held, self._numbers):
            signal.signal(number, to)


def _start() -> None:
    """Hold the notices back, and leave no trace for the script and its children."""
    folder, _, path = os.environ["PYTHONPATH"].partition(os.pathsep)
    if path:
        os.environ["PYTHONPATH"] = path
    else:
        del os.environ["PYTHONPATH"]
    sys.path.remove(folder)
    sys.path_importer_cache.pop(folder, None)
    _Held([int(number) for number in os.environ.pop("SHARDCLIP_HELD").split(",")])


_start()
# the one that this stood in front of; Python expects that there may be none
del sys.modules[__name__]
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
