"""Who writes to memory is seen; what only reads is not."""

import gc

import pytest
import torch

from shardclip import compat
from shardclip.step import watch
from shardclip.step.watch import Watch
from tests.kernels.accelerator import accelerator


def test_this_torch_can_tell():
    assert watch.works_on(torch.device("cpu"))


def test_accelerators_are_not_watched():
    assert not watch.works_on(torch.device("cuda"))
    with accelerator() as device:
        assert watch.begin(torch.ones(2, device=device)) is None


def test_a_write_through_any_view_is_seen():
    whole = torch.ones(8)
    first, last = whole[:4], whole[4:]
    seen = watch.begin(first)
    assert seen.saw_nothing(last)
    torch._foreach_mul_([last], 2.0)
    assert not seen.saw_nothing(first)


def test_nothing_is_copied_and_no_address_changes():
    tensor = torch.ones(8)
    address = tensor.data_ptr()
    watch.begin(tensor)
    tensor.mul_(2)
    assert tensor.data_ptr() == address
    assert tensor.tolist() == [2.0] * 8


def test_a_second_watch_does_not_hide_a_write_from_the_first():
    tensor = torch.ones(8)
    first = watch.begin(tensor)
    torch._foreach_mul_([tensor], 2.0)
    second = watch.begin(tensor)
    assert not first.saw_nothing(tensor)
    assert second.saw_nothing(tensor)


def test_those_who_watch_together_see_the_same():
    tensor = torch.ones(8)
    assert watch.begin(tensor) is watch.begin(tensor[2:])


def test_other_memory_is_another():
    tensor = torch.ones(8)
    seen = watch.begin(tensor)
    other = torch.ones(8)
    watch.begin(other)
    assert not seen.saw_nothing(other)


def test_it_ends():
    tensor = torch.ones(8)
    seen = watch.begin(tensor)
    watch.end(tensor)
    assert not compat.is_marked(tensor)
    assert not seen.saw_nothing(tensor)


def test_nobody_is_kept():
    tensor = torch.ones(8)
    key = compat.storage_address(tensor)
    assert isinstance(watch.begin(tensor), Watch)
    gc.collect()
    assert key not in watch._watches


def test_memory_that_numpy_has_allocated_is_not_watched():
    numpy = pytest.importorskip("numpy")
    assert watch.begin(torch.from_numpy(numpy.ones(4))) is None


def test_shared_memory_is_not_watched():
    assert watch.begin(torch.ones(4).share_memory_()) is None


@pytest.mark.parametrize("fault", ["not marked", "not there", "stays marked", "lost by reading"])
def test_a_torch_that_marks_otherwise_is_not_trusted(fault, monkeypatch):
    asked = []

    def fails(tensor):
        raise AttributeError("_lazy_clone")

    def asks(tensor):
        asked.append(tensor)
        return fault == "stays marked"

    if fault in ("not marked", "not there"):
        given = fails if fault == "not there" else lambda tensor: None
        monkeypatch.setattr(torch, "_lazy_clone", given)
    else:
        monkeypatch.setattr(compat, "is_marked", asks)
    monkeypatch.setattr(watch, "_works", watch._works.__wrapped__)
    assert not watch.works_on(torch.device("cpu"))


def test_a_copy_to_the_host_is_awaited_on_the_tensors_own_device(monkeypatch):
    """Not on the current one, which is another without ``set_device()``."""
    recorded = []

    class Event:
        def __init__(self, device):
            pass

        def record(self, stream=None):
            recorded.append(stream)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: ("stream", device))
    with accelerator():
        second = torch.device("cuda", 1)
        compat.HostCopy(torch.ones(2, device=second))
    assert recorded == [("stream", second)]
