"""Every element is owned by exactly one rank, at any size, without a process group."""

from collections import Counter
from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shardclip.layout.ownership import Mesh, own, pieces_of, place, segment, tile_offsets


def mesh_of(*shape: int, names: tuple[str, ...] = (), first: int = 0) -> Mesh:
    size = 1
    for axis in shape:
        size *= axis
    return Mesh(tuple(range(first, first + size)), shape, names)


def sliced(root: Mesh, keep: tuple[int, ...], rank: int) -> Mesh:
    """The sub-mesh over the axes ``keep`` that ``rank`` is in."""
    coordinates = list(product(*(range(n) for n in root.shape)))
    mine = coordinates[root.ranks.index(rank)]
    members = tuple(
        r
        for r, c in zip(root.ranks, coordinates, strict=True)
        if all(c[axis] == mine[axis] for axis in range(len(c)) if axis not in keep)
    )
    names = tuple(root.names[axis] for axis in keep) if root.names else ()
    return Mesh(members, tuple(root.shape[axis] for axis in keep), names)


def count_reads(root: Mesh, keep: tuple[int, ...], replicated: tuple[bool, ...], numel: int):
    """How often each (stage, piece, element) is read over all ranks, each deciding alone."""
    group = frozenset(root.ranks)
    reads: Counter = Counter()
    for rank in root.ranks:
        mesh = sliced(root, keep, rank)
        where = place(mesh, replicated, root, rank)
        owned = own(where, group)
        assert rank in owned.holders
        piece = where.pieces[mesh.ranks.index(rank)]
        start, stop = segment(numel, owned.holders.index(rank), len(owned.holders))
        for element in range(start, stop):
            reads[where.stage, piece, element] += 1
    return reads


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_each_element_is_read_once(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    axes = range(len(shape))
    keep = tuple(sorted(data.draw(st.sets(st.sampled_from(axes), min_size=1))))
    replicated = tuple(data.draw(st.booleans()) for _ in keep)
    names = tuple(data.draw(st.permutations(["pp", "dp", "tp", "ep"]))[: len(shape)])
    root = mesh_of(*shape, names=names, first=data.draw(st.sampled_from([0, 5])))
    numel = data.draw(st.integers(1, 12))
    reads = count_reads(root, keep, replicated, numel)
    assert set(reads.values()) == {1}
    pieces = max(pieces_of([shape[axis] for axis in keep], replicated)) + 1
    left_out_stage = "pp" in names and names.index("pp") not in keep
    stages = shape[names.index("pp")] if left_out_stage else 1
    assert len(reads) == numel * pieces * stages


@pytest.mark.parametrize(
    ("shape", "names", "keep", "replicated"),
    [
        ((16384,), ("dp",), (0,), (False,)),
        ((2048, 8), ("dp", "tp"), (0,), (False,)),
        ((8, 256, 8), ("pp", "dp", "tp"), (1,), (False,)),
        ((8, 16, 16, 8), ("pp", "rep", "shard", "tp"), (1, 2), (True, False)),
        ((8, 16, 16, 8), ("pp", "rep", "shard", "tp"), (1, 2, 3), (True, False, True)),
    ],
)
def test_sixteen_thousand_ranks(shape, names, keep, replicated):
    """Each piece's holders share it, and the holders' lists partition the ranks."""
    root = mesh_of(*shape, names=names)
    group = frozenset(root.ranks)
    seen: Counter = Counter()
    for rank in root.ranks[:: max(1, len(root.ranks) // 11)]:
        owned = own(place(sliced(root, keep, rank), replicated, root, rank), group)
        assert owned.holders.count(rank) == 1
        assert list(owned.holders) == sorted(set(owned.holders))
        other = owned.holders[-1]
        again = own(place(sliced(root, keep, other), replicated, root, other), group)
        assert again.holders == owned.holders
        seen[len(owned.holders)] += 1
    copies = 1
    for axis, size in enumerate(shape):
        copied = replicated[keep.index(axis)] if axis in keep else names[axis] != "pp"
        copies *= size if copied else 1
    assert set(seen) == {copies}


@pytest.mark.parametrize(
    ("positions", "length", "expected"),
    [
        ([0, 1], 4, [0, 2]),
        ([2, 3], 4, [0, 2]),
        ([1, 3], 4, [0, 1]),
        ([0, 1, 4, 5], 8, [0, 2]),
        ([0, 2], 3, None),
        ([0, 3], 4, None),
    ],
)
def test_tiling(positions, length, expected):
    assert tile_offsets(positions, length) == expected


def test_a_sub_mesh_of_an_unnamed_root_is_told_by_its_ranks():
    """Flattened and unflattened meshes lose their axes' names, not their ranks."""
    world = mesh_of(8)
    slice_of_it = Mesh((1, 3, 5, 7), (2, 2))
    owned = own(place(slice_of_it, (False, False), world, 3), frozenset(range(8)))
    assert owned.holders == (2, 3)


def test_stages_of_a_pipeline_are_other_parameters():
    root = mesh_of(2, 4, names=("pp", "dp"))
    where = place(sliced(root, (1,), 5), (False,), root, 5)
    owned = own(where, frozenset(range(8)))
    assert (owned.holders, owned.domain, owned.stage) == ((5,), (4, 5, 6, 7), 1)


def test_a_tensor_that_spans_the_pipeline_axis_is_one_tensor():
    root = mesh_of(2, 2, names=("pp", "dp"))
    owned = own(place(sliced(root, (0,), 3), (True,), root, 3), frozenset(range(4)))
    assert owned.holders == (0, 1, 2, 3)
    assert owned.stage is None


def test_a_mesh_that_is_nobodys_sub_mesh_stands_for_itself():
    mesh = Mesh((2, 3), (2,))
    owned = own(place(mesh, (False,), mesh, 3), frozenset(range(4)))
    assert (owned.holders, owned.domain) == ((3,), (2, 3))


def test_names_decide_which_tiles_hold_copies():
    root = mesh_of(4)
    where = place(Mesh((0, 1), (2,)), (False,), root, 0)
    assert own(where, frozenset(range(4)), frozenset({0, 1})).holders == (0,)
    assert own(where, frozenset(range(4)), frozenset(range(4))).holders == (0, 2)


def test_copies_outside_the_group_do_not_count():
    root = mesh_of(2, 2)
    where = place(root, (True, False), root, 0)
    assert own(where, frozenset({0, 1})).holders == (0,)


def test_pieces_outside_the_group_are_refused():
    root = mesh_of(4)
    with pytest.raises(ValueError, match="outside the group"):
        own(place(root, (False,), root, 0), frozenset({0, 1}))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("numel", [0, 1, 5, 99, 1000])
def test_segments_cover_and_balance(numel, count):
    parts = [segment(numel, index, count) for index in range(count)]
    assert [e for start, stop in parts for e in range(start, stop)] == list(range(numel))
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1
