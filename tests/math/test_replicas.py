"""The proof of copies, without ranks: each holder's lanes are added up by hand."""

import pytest
import torch

from shardclip import replicas
from shardclip.replicas import Copy

TOTAL = torch.tensor(100.0, dtype=torch.float64)


def contribute(lanes, tensors, copies):
    sizes = [t.numel() * (1 + t.is_complex()) for t in tensors]
    made = replicas.Proof(copies, sizes, torch.device("cpu"))
    lanes += made.lanes(made.sketches(tensors), len(lanes), lanes.device)


def proof(copies: list[torch.Tensor | None], total=TOTAL, ordinal=0) -> bool:
    """Whether the lanes say that the copies, one a rank, disagree."""
    lanes = torch.zeros(1, replicas.LANES, dtype=torch.float64)
    holders = tuple(range(len(copies)))
    for rank, tensor in enumerate(copies):
        if tensor is not None:
            contribute(lanes, [tensor], [Copy(0, ordinal, holders, rank, 1 / len(copies))])
    return bool(replicas.disagreeing(lanes, total)[0])


@pytest.mark.parametrize("count", [2, 3, 4, 7, 64, 4096])
def test_coefficients_sum_to_zero_and_measure_the_difference(count):
    c = replicas.coefficients(count)
    assert c.shape == (count, replicas.SKETCH)
    assert c.sum(0).abs().max() < 1e-9
    torch.testing.assert_close(c.square().sum(0), torch.full((8,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("count", [2, 3, 4, 16])
@pytest.mark.parametrize("size", [1, 5, 8, 9, 64, 65, 10_000])
def test_equal_copies_agree_and_one_that_is_other_does_not(count, size):
    tensor = torch.randn(size)
    assert not proof([tensor.clone() for _ in range(count)])
    assert proof([tensor] * (count - 1) + [tensor.flip(0) * 2])


@pytest.mark.parametrize("size", [1, 8, 64, 100_000])
@pytest.mark.parametrize(("part", "found"), [(0.005, False), (0.02, True)])
def test_tolerance_of_the_tensors_own_size(size, part, found):
    tensor = torch.randn(size, dtype=torch.float64)
    tensor *= TOTAL / tensor.norm()
    assert proof([tensor, tensor * (1 + part)]) is found


@pytest.mark.parametrize("size", [1, 8, 64, 100_000])
@pytest.mark.parametrize(("part", "found"), [(2e-6, False), (5e-5, True)])
def test_tolerance_of_the_total_norm(size, part, found):
    """A gradient that is nothing but rounding noise may differ altogether."""
    noise = [torch.randn(size, dtype=torch.float64).abs() for _ in range(2)]
    noise = [n * TOTAL * part / n.norm() * sign for n, sign in zip(noise, (1, -1), strict=True)]
    assert proof(noise) is found


def test_noise_of_a_few_bfloat16_steps_passes():
    tensor = torch.randn(100_000).bfloat16()
    noisy = [tensor.float() * (1 + (torch.rand(100_000) - 0.5) * 2**-7) for _ in range(8)]
    assert not proof([n.bfloat16() for n in noisy])


def test_a_copy_that_is_missing_is_found_unless_it_is_zero():
    assert proof([torch.ones(4), None])
    assert not proof([torch.zeros(4), None])


def test_shards_whose_sums_of_squares_are_equal_are_found():
    assert proof([torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])])
    assert proof([torch.tensor([3.0, 4.0]), torch.tensor([3.0, -4.0])])


def test_swapped_tensors_are_found_even_in_one_slot():
    first, second = torch.randn(100), torch.randn(100)
    lanes = torch.zeros(1, replicas.LANES, dtype=torch.float64)
    for rank, pair in enumerate([(first, second), (second, first)]):
        copies = [Copy(0, ordinal, (0, 1), rank, 0.5) for ordinal in (0, 512)]
        contribute(lanes, pair, copies)
    assert replicas.disagreeing(lanes, TOTAL)[0]


def test_opposite_errors_do_not_cancel():
    tensor = torch.randn(100)
    error = torch.randn(100)
    assert proof([tensor + error, tensor - error, tensor, tensor])


def test_a_shared_slot_is_suspected_where_a_large_tensor_hides_a_small_one():
    large, small = torch.full((8,), 30.0), torch.full((8,), 0.1)
    lanes = torch.zeros(1, replicas.LANES, dtype=torch.float64)
    for rank, factor in enumerate((1.0, 2.0)):
        copies = [Copy(0, ordinal, (0, 1), rank, 0.5) for ordinal in (0, 512)]
        contribute(lanes, [large, small * factor], copies)
    assert not replicas.disagreeing(lanes, TOTAL)[0]
    assert replicas.suspicious(lanes, TOTAL)[0]


def test_the_sample_meets_every_column_of_a_matrix():
    columns = torch.arange(1024.0).expand(1024, 1024)
    assert len(set(replicas.spread(columns.contiguous()).tolist())) == replicas.SAMPLE


def test_complex_and_half_tensors():
    tensor = torch.randn(50, dtype=torch.complex64)
    assert proof([tensor, tensor.conj()])
    half = torch.randn(50).half()
    assert not proof([half, half])


@pytest.mark.parametrize(
    "cut", [lambda b: b[:, 0], lambda b: b.view(-1)[::2], lambda b: b.T[:1], lambda b: b.t()[0]]
)
@pytest.mark.parametrize("rows", [8, 300])
def test_a_sample_is_of_the_tensor_and_not_of_its_neighbours(cut, rows):
    wide = torch.arange(2.0 * rows).view(rows, 2)
    tensor = cut(wide)
    sample = replicas.spread(tensor)
    assert sample.tolist() == replicas.spread(tensor.contiguous()).tolist()
    assert set(sample.tolist()) <= set(tensor.flatten().tolist())
