"""What ranks tell each other: any bytes, without numpy; a rank's own failure is nobody else's."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardclip import GradClipper
from shardclip.comm import missing_ranks, reduce
from shardclip.step import agreement
from tests.ranks import everywhere, on_ranks
from tests.ranks.collectives import count_collectives


def values(rank: int) -> list[object]:
    return ["", rank, b"x" * rank, None, {"rank": (rank, float("inf"))}, bytes(range(256)) * 9000]


class Unpicklable:
    def __reduce__(self):
        raise OSError("no such thing")


class Unreadable:
    """Becomes, where it is read, what it was told to call."""

    def __reduce__(self):
        return int, ("not a number",)


@on_ranks(3)
def test_every_rank_gets_every_value():
    world = reduce.resolve(None)
    for number in range(6):
        with count_collectives() as calls:
            told = reduce.gather(values(dist.get_rank())[number], world)
        assert told == [values(rank)[number] for rank in range(3)]
        assert [call.op for call in calls] == ["all_gather"] * 2


@on_ranks(4)
def test_of_a_group_its_ranks_alone():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    world = reduce.resolve(mesh["a"])
    assert reduce.gather(dist.get_rank(), world) == list(world.ranks)
    assert world.size == 2


@on_ranks(2)
def test_numpy_is_not_asked():
    kept, torch.Tensor.numpy = torch.Tensor.numpy, None
    try:
        GradClipper([("w", torch.nn.Parameter(torch.ones(2)))], 1.0)
    finally:
        torch.Tensor.numpy = kept


@on_ranks(2)
def test_a_default_device_does_not_matter():
    world = reduce.resolve(None)
    with torch.device("meta"):
        assert reduce.gather(dist.get_rank(), world) == [0, 1]


@pytest.mark.parametrize("through", [reduce.gather, agreement.agree])
@on_ranks(3)
def test_what_cannot_be_pickled_on_one_rank_is_everyones_error(through):
    value = Unpicklable() if dist.get_rank() == 1 else "fine"
    with pytest.raises(RuntimeError, match=r"OSError: no such thing \(rank 1\)") as raised:
        through(value, reduce.resolve(None))
    assert len(set(everywhere(str(raised.value)))) == 1
    assert everywhere(dist.get_rank()) == [0, 1, 2]  # all are there, and at the same place


@on_ranks(2)
def test_what_cannot_be_read_is_said_to_be_so():
    value = Unreadable() if dist.get_rank() == 1 else "fine"
    with pytest.raises(RuntimeError, match="what rank 1 has sent cannot be unpickled on this rank"):
        reduce.gather(value, reduce.resolve(None))


LOCAL = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    NotImplementedError("no such operation"),
    RecursionError("maximum recursion depth exceeded"),
    MemoryError("no room"),
]
if hasattr(torch, "AcceleratorError"):
    LOCAL.append(torch.AcceleratorError("CUDA error: device-side assert triggered"))


@pytest.mark.parametrize("what", ["gather", "all_reduce", "wait"])
@pytest.mark.parametrize("error", LOCAL, ids=lambda error: type(error).__name__)
def test_what_is_wrong_here_is_not_put_on_the_network(error, what, monkeypatch):
    def fails(*_, **__):
        raise error

    def asked(*_):
        raise AssertionError("nobody else is to be asked")

    monkeypatch.setattr(missing_ranks, "explain", asked)
    monkeypatch.setattr(dist, "all_reduce" if what == "all_reduce" else "all_gather", fails)
    monkeypatch.setattr(reduce.compat, "bytes_device", lambda *_: torch.device("cpu"))
    world = reduce.World((0, 1), 0, object(), torch.device("cpu"))
    calls = {
        "gather": lambda: reduce.gather(1, world),
        "all_reduce": lambda: reduce.all_reduce(torch.ones(1), world),
        "wait": reduce.Work(type("", (), {"wait": fails})(), world).wait,
    }
    with pytest.raises(type(error), match=re.escape(str(error))) as raised:
        calls[what]()
    assert raised.value is error


@on_ranks(2)
def test_a_failure_of_all_ranks_blames_none():
    told = missing_ranks.explain(RuntimeError("it broke"), reduce.resolve(None), "the test")
    assert told == (
        "the test failed: every rank has made the call, and it has failed on each. If the backend "
        "names no cause, look at the network, or allow more time "
        "(init_process_group(timeout=...)). The backend said: it broke"
    )
