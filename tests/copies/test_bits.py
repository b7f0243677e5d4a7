"""Hashes of all bits and places, and the two lanes that compare them."""

import pytest
import torch

from shardclip.copies import bits
from shardclip.copies.proof import Copy
from shardclip.math import fingerprints

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
SIZES = [1, 2, 63, bits.ROW - 1, bits.ROW, bits.ROW + 1, 3 * bits.ROW + 17]


def flipped(tensor, index, bit):
    out = tensor.clone()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[
        out.element_size() if not out.is_complex() else out.element_size() // 2
    ]
    flat = (torch.view_as_real(out) if out.is_complex() else out).view(-1).view(integers)
    one = torch.tensor(1, dtype=integers)
    flat[index] ^= one << bit
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_every_flipped_bit_is_found(dtype, numel):
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    whole = bits.hash_of(tensor)
    for bit in range(16):
        for index in {0, numel // 2, numel - 1}:
            assert bits.hash_of(flipped(tensor, index, bit)) != whole, (index, bit)
    assert bits.hash_of(tensor.clone()) == whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_swapped_pair_is_found_even_of_one_number_and_its_negative(dtype):
    """They differ in one bit alone, the highest: where sums forget it, so would a hash."""
    tensor = torch.ones(3 * bits.ROW, dtype=dtype)
    tensor[5] = -1
    for other in (4, 6, 7, 100, bits.ROW + 5, 2 * bits.ROW + 6):
        moved = torch.ones(3 * bits.ROW, dtype=dtype)
        moved[other] = -1
        assert bits.hash_of(moved) != bits.hash_of(tensor), other


def test_swapped_rows_are_found():
    tensor = torch.arange(2 * bits.ROW, dtype=torch.float32)
    swapped = torch.cat([tensor[bits.ROW :], tensor[: bits.ROW]])
    assert bits.hash_of(tensor) != bits.hash_of(swapped)


def test_order_is_that_of_the_elements_whatever_the_strides():
    tensor = torch.randn(64, 200)
    assert bits.hash_of(tensor) == bits.hash_of(tensor.t().contiguous().t())


def test_length_and_places_count():
    assert bits.hash_of(torch.zeros(100)) != bits.hash_of(torch.zeros(101))
    values = torch.tensor([1.0])
    one, other = (
        torch.sparse_coo_tensor([[i]], values, (4,), check_invariants=True) for i in (0, 1)
    )
    hashes = [bits.hash_of_local(t, t.coalesce().values()) for t in (one, other)]
    assert hashes[0] != hashes[1]


def reduced(values, holders, ordinal=3):
    """The two lanes after the sum over all holders."""
    lanes = torch.zeros(bits.LANES, dtype=torch.float64)
    for index, value in enumerate(values):
        copy = Copy(0, ordinal, holders, index, 1.0)
        made = bits.Drift([copy], torch.device("cpu"))
        lanes += made.lanes(made.hashes([value], [value]))
    return lanes


@pytest.mark.parametrize("count", [2, 3, 8, 33])
def test_lanes_tell_copies_that_differ(count):
    holders = tuple(range(count))
    tensor = torch.randn(1000)
    assert not bits.found(reduced([tensor] * count, holders))
    for odd in {0, 1, count - 1}:
        values = [flipped(tensor, 7, 3) if index == odd else tensor for index in range(count)]
        assert bits.found(reduced(values, holders))


def test_the_same_difference_in_two_tensors_does_not_cancel():
    tensor, holders = torch.randn(1000), (0, 1)
    other = flipped(tensor, 0, 0)
    lanes = reduced([tensor, other], holders, 1) + reduced([other, tensor], holders, 2)
    assert bits.found(lanes)


def test_lanes_stay_whole_numbers_of_many_ranks_and_tensors():
    lanes = torch.full((2,), float(fingerprints.BITS - 1), dtype=torch.float64) * (1 << 20)
    assert float(lanes[0]) == (fingerprints.BITS - 1) << 20
