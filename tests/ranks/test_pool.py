"""The pool of ranks itself: whatever happens to a rank fails one test and no other."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import (
    Collective,
    RankError,
    count_collectives,
    everywhere,
    on_ranks,
    raised_everywhere,
    run_on_ranks,
)
from tests.ranks.pool import CALL_LIMIT_S


def report(offset):
    return dist.get_rank() + offset, os.getpid()


def fail_on(rank, how):
    if dist.get_rank() == rank:
        how()
    dist.barrier()


def raise_in_a_function():
    marker = "a local value"
    raise LookupError(f"planted, with {marker}")


def exit_at_once():
    os._exit(3)


def sleep_for_long():
    time.sleep(1000)


def assert_working_pool():
    results = run_on_ranks(2, report, 10)
    assert [value for value, _ in results] == [10, 11]


def test_results_come_back_by_rank_from_the_same_processes():
    first = run_on_ranks(2, report, offset=5)
    assert [value for value, _ in first] == [5, 6]
    assert run_on_ranks(2, report, 5) == first


def test_fresh_starts_new_processes():
    first = {pid for _, pid in run_on_ranks(2, report, 0)}
    assert first.isdisjoint(pid for _, pid in run_on_ranks(2, report, 0, fresh=True))


def test_a_rank_that_raises_is_shown_with_its_traceback_and_locals():
    with pytest.raises(RankError) as caught:
        run_on_ranks(2, fail_on, 1, raise_in_a_function)
    message = str(caught.value)
    assert "rank 1: raised" in message
    assert "LookupError: planted, with a local value" in message
    assert "in raise_in_a_function" in message
    assert "marker = 'a local value'" in message
    assert "rank 0: did not come back" in message  # it waits in the barrier
    assert_working_pool()


def test_a_rank_that_dies_is_shown_with_its_exit_code():
    with pytest.raises(RankError, match=r"rank 1: died\nexit code 3"):
        run_on_ranks(2, fail_on, 1, exit_at_once)
    assert_working_pool()


def test_a_rank_that_hangs_is_shown_with_its_stack_within_the_limit():
    assert_working_pool()  # started, and this module imported: that is not what is timed
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_on_ranks(2, fail_on, 0, sleep_for_long, limit_s=2.0)
    assert time.monotonic() - start < CALL_LIMIT_S / 2  # it was not this test's limit that counted
    assert "rank 0: did not come back" in str(caught.value)
    assert "in sleep_for_long" in str(caught.value)
    assert_working_pool()


def test_what_cannot_be_sent_back_fails_alone():
    with pytest.raises(RankError, match="pickle"):
        run_on_ranks(2, return_a_lambda)
    assert_working_pool()


def return_a_lambda():
    return lambda: None


@on_ranks(2)
def test_every_kind_of_collective_is_counted():
    tensor = torch.ones(4)
    group = dist.group.WORLD
    with count_collectives() as calls:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.broadcast(tensor, 0)
        dist.all_gather([torch.empty(4), torch.empty(4)], tensor)
        dist.barrier()
    assert [call.op for call in calls] == ["all_reduce"] * 2 + ["broadcast", "all_gather"] + [
        "barrier"
    ]
    assert calls[0] == Collective("all_reduce", 4, torch.float32)
    with count_collectives() as calls:
        work = torch.ops._c10d_functional.all_reduce(tensor, "sum", group.group_name)
        torch.ops._c10d_functional.wait_tensor(work)
    assert calls == [Collective("all_reduce", 4, torch.float32)]
    with count_collectives() as calls:
        group._get_backend(torch.device("cpu")).allreduce([tensor]).wait()
        dist.new_group([0, 1])
    assert [call.op for call in calls] == ["unseen", "new_group"]


@on_ranks(2)
def test_errors_are_compared_over_the_ranks():
    rank = dist.get_rank()

    def alike():
        raise ValueError("weight on rank 1")

    def only_on_one():
        if rank:
            raise ValueError("weight on rank 1")

    assert raised_everywhere(alike, ValueError, "Rank 1", "WEIGHT") == "weight on rank 1"
    with pytest.raises(AssertionError, match=r"expected; by rank|ranks differ"):
        raised_everywhere(only_on_one, ValueError)
    assert everywhere(rank) == [0, 1]
