"""The one fault of torch's that a program is started again for."""

from subprocess import CompletedProcess

import pytest

from tests import aborts


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        (["", ""], 1),
        (["ValueError", ""], 1),
        ([aborts.SAID, ""], 2),
        ([aborts.SAID, aborts.SAID, ""], 3),
        ([aborts.SAID] * 4, 3),
    ],
)
def test_a_few_times_and_for_nothing_else(said, ends):
    runs = iter(said)
    started = []

    def start():
        text = next(runs)
        started.append(text)
        return CompletedProcess([], 1 if text else 0, "", text)

    done = aborts.run_through(start)
    assert len(started) == ends
    assert done.stderr == said[ends - 1]
    assert bool(done.returncode) == bool(said[ends - 1])
