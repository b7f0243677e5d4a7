"""The path that shardclip takes on a device, taken on CPU, to count what would wait there."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import shardclip.kernels.blocked
import shardclip.kernels.foreach
import shardclip.step.measure
import shardclip.step.verdict


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Let reading a payload cost something, and sum with the calls that any device takes.

    On CPU a read is free, and shardclip uses that; what it does there says nothing about CUDA. The
    verdict on the step before has been copied to the host by then, and reading it is no sync.
    """
    kernels = shardclip.kernels
    with (
        mock.patch.object(shardclip.step.measure, "reads_are_free", return_value=False),
        mock.patch.object(shardclip.step.verdict.Deferred, "settle"),
        mock.patch.object(kernels.blocked, "PowerSums", kernels.foreach.PowerSums),
    ):
        yield
