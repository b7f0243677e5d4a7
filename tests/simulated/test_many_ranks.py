"""Many ranks in one process: each plans and fills its payload alone; the payloads are added up.

The same code as in a real step, but for the all-reduce.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from shardclip.comm.payload import Flags
from shardclip.comm.world import World
from shardclip.copies import proof
from shardclip.layout.ownership import Mesh, own, pieces_of, place
from shardclip.layout.planner import Planner
from shardclip.layout.sources import Source
from shardclip.math.norm import is_maximum
from shardclip.plan import plan
from shardclip.step import measure

CPU = torch.device("cpu")


def mesh_of(*shape: int) -> Mesh:
    return Mesh(tuple(range(math.prod(shape))), shape)


def step(mesh: Mesh, tensors, p: float, spoil=None) -> measure.Measured:
    """One step of all ranks of a mesh.

    Args:
        mesh: All ranks.
        tensors: ``(full tensor, replicated axes)``; the sharded axes cut it in pieces of any size.
        p: The norm type.
        spoil: Called with rank, index and local tensor; returns what that rank really holds.
    """
    payloads = []
    for rank in mesh.ranks:
        world = World(mesh.ranks, rank)
        pairs = []
        for index, (full, replicated) in enumerate(tensors):
            where = place(mesh, replicated, mesh, rank)
            piece = where.pieces[rank]
            local = full.tensor_split(max(pieces_of(mesh.shape, replicated)) + 1)[piece]
            local = local if spoil is None else spoil(rank, index, local)
            owned = own(where, frozenset(mesh.ranks))
            pairs.append((Source(f"t{index}", full, ownership=owned), local))
        made = plan.make(
            Planner(world, None),
            pairs,
            plan.FUNCTION_LANES,
            spread=True,
            maximum=is_maximum(p),
        )
        assert not made.problems
        local = plan.locals_of(made, [grad for _, grad in pairs])
        parts, wholes = plan.readings(made, local)
        payloads.append(measure.fill(made, parts, wholes, local, p, CPU, Flags())[0])
    assert {payload.shape for payload in payloads} == {(plan.FUNCTION_LANES.size,)}
    stacked = torch.stack(payloads)
    reduced = stacked.amax(0) if is_maximum(p) else stacked.sum(0)
    return measure.conclude(made, reduced, p, [], [], None)


def exact(tensors, p: float) -> float:
    flat = torch.cat([t.double().flatten() for t, _ in tensors])
    return float(torch.linalg.vector_norm(flat, p))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_mesh_any_placement(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    mesh = mesh_of(*shape)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    tensors = [
        (
            torch.randn(data.draw(st.integers(0, 40)), generator=generator),
            tuple(data.draw(st.booleans()) for _ in shape),
        )
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    p = data.draw(st.sampled_from([0, 1, 2, 3, math.inf]))
    if is_maximum(p) and not any(t.numel() for t, _ in tensors):
        return
    found = step(mesh, tensors, p)
    assert float(found.total_norm) == pytest.approx(exact(tensors, p), rel=1e-6, abs=0)
    if not is_maximum(p):
        assert not proof.suspicious(found.proof, found.size()).any()


@pytest.mark.parametrize("replicated", [(False, False), (True, False), (True, True)])
def test_five_hundred_ranks(replicated):
    tensors = [(torch.randn(3000), replicated), (torch.randn(17), replicated)]
    found = step(mesh_of(16, 32), tensors, 2.0)
    assert float(found.total_norm) == pytest.approx(exact(tensors, 2.0), rel=1e-6)
    assert not proof.suspicious(found.proof, found.size()).any()


@pytest.mark.parametrize("shape", [(2, 2), (8, 4), (64, 2)])
def test_one_copy_that_drifted_is_found_among_many(shape):
    tensors = [(torch.randn(1000), (True, False)), (torch.randn(500), (True, True))]

    def spoil(rank, index, local):
        return local * 1.5 if (rank, index) == (1, 0) else local

    found = step(mesh_of(*shape), tensors, 2.0, spoil)
    assert proof.disagreeing(found.proof, found.size()).sum() == 1


def test_the_order_of_copies_does_not_matter_to_who_reads_what():
    """Copies of other strides are cut at the same elements."""
    full = torch.randn(6, 4)

    def transpose(rank, index, local):
        return local.t().contiguous().t() if rank % 2 else local

    found = step(mesh_of(4), [(full, (True,))], 2.0, transpose)
    assert float(found.total_norm) == pytest.approx(exact([(full, None)], 2.0), rel=1e-6)


def test_more_copies_than_slots_share_them():
    tensors = [(torch.randn(3), (True,)) for _ in range(plan.FUNCTION_LANES.slots + 7)]
    found = step(mesh_of(2), tensors, 2.0)
    assert float(found.total_norm) == pytest.approx(exact(tensors, 2.0), rel=1e-6)
    shared = found.proof[:, proof.SKETCH + 1] > 1.5
    assert int(shared.sum()) == 7
    assert not proof.suspicious(found.proof, found.size()).any()


def test_three_copies_of_a_tensor_that_each_rank_reads_in_full_count_once():
    """A third is no float32 number: the sum is weighted in float64."""
    tensors = torch.full((7,), 3.0)
    payloads = []
    for rank in range(3):
        planner = Planner(World((0, 1, 2), rank), None)
        made = plan.make(planner, [(Source("t", tensors), tensors)], plan.FUNCTION_LANES)
        parts, wholes = plan.readings(made, [tensors])
        payloads.append(measure.fill(made, parts, wholes, wholes, 0.0, CPU, Flags())[0])
    assert float(sum(payload[0] for payload in payloads)) == pytest.approx(7, rel=1e-15)
