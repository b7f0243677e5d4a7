import threading

import pytest
from shardclip.launch.environment import Hosts
from shardclip.launch.network import free_port
from shardclip.launch.options import RunOptions
from shardclip.launch.plan import make_plan
from shardclip.launch.run_store import RunStore

from tests.waiting import PATIENCE_S


class Slow(RunStore):
    """Its calls to the store take as long as the test says."""

    def __init__(self, *given):
        super().__init__(*given)
        self.called, self.may_return, self.returned = (threading.Event() for _ in range(3))

    def _exchange(self, store, beat):
        self.called.set()
        self.may_return.wait(PATIENCE_S)
        self.returned.set()


@pytest.fixture
def store():
    plan = make_plan(RunOptions(nproc_per_node=1), Hosts("none"), {}, "own")
    made = Slow(plan, free_port(), lambda failure: None)
    yield made
    made.may_return.set()


def test_no_call_to_the_store_is_under_way_when_python_ends(store):
    """It would come back to an interpreter that is no more, and abort the process."""
    store.start(PATIENCE_S)
    assert store.called.wait(PATIENCE_S)
    seen = []

    def stop():
        store.stop()
        seen.append(store.returned.is_set())

    stopping = threading.Thread(target=stop)
    stopping.start()
    stopping.join(0.5)  # time to return too early, were it to
    store.may_return.set()
    stopping.join(PATIENCE_S)
    assert seen == [True]
