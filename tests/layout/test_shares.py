"""Who reads what of what several ranks hold: everything once, nobody much more than its share."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shardclip.layout.ownership import BLOCK, Shares, segment


def loads(holders, sizes):
    """Elements that each holder reads; checks that the parts cover every piece once."""
    read = dict.fromkeys(holders, 0)
    taken = [[] for _ in sizes]
    for rank in holders:
        shares = Shares(rank)
        for index, numel in enumerate(sizes):
            part = shares.part(holders, numel)
            if part is not None:
                start, stop = segment(numel, *part)
                taken[index].append((start, stop))
                read[rank] += stop - start
    for numel, parts in zip(sizes, taken, strict=True):
        edges = [0] + [stop for _, stop in sorted(parts)]
        assert [start for start, _ in sorted(parts)] == edges[:-1]
        assert edges[-1] == numel
    return list(read.values())


SIZES = st.one_of(st.integers(0, 5000), st.integers(0, 40 * BLOCK))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 9), st.lists(SIZES, max_size=60))
def test_nobody_reads_more_than_a_fair_share_and_a_block(count, sizes):
    read = loads(tuple(range(3, 3 + 2 * count, 2)), sizes)
    assert max(read) <= 1.05 * sum(sizes) / count + BLOCK


@pytest.mark.parametrize("count", [2, 8, 64])
def test_tiny_tensors_are_spread_over_all(count):
    """Cut one by one, tensors of one element would all fall to the same rank."""
    read = loads(tuple(range(count)), [1] * 1000 + [64 * 64] * 1000)
    assert max(read) - min(read) <= 64 * 64


def test_large_ones_are_cut_evenly():
    assert set(loads((0, 1, 2), [3 << 20] * 7)) == {7 << 20}


def test_sets_of_ranks_do_not_all_begin_with_the_lowest():
    firsts = {
        next(r for r in (0, other) if Shares(r).part((0, other), 10) is not None)
        for other in range(1, 40)
    }
    assert len(firsts) > 10


def test_many_thousands_of_holders():
    holders = tuple(range(16_384))
    shares = Shares(5)
    for numel in [50_000_000, 8192, 1] * 300:
        shares.part(holders, numel)
