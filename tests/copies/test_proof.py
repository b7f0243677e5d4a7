"""The proof of copies, without ranks: each holder's lanes are added up by hand."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from shardclip.copies import proof, samples
from shardclip.copies.proof import Copy

TOTAL = torch.tensor(100.0, dtype=torch.float64)


def contribute(lanes, tensors, copies):
    extents = [samples.extent(t, t.shape) for t in tensors]
    made = proof.Proof(copies, extents, torch.device("cpu"))
    lanes += made.lanes(made.sketches(tensors), len(lanes), lanes.device)


def differ(copies: list[torch.Tensor | None], total=TOTAL, ordinal=0) -> bool:
    """Whether the lanes say that the copies, one a rank, disagree."""
    lanes = torch.zeros(1, proof.LANES, dtype=torch.float64)
    holders = tuple(range(len(copies)))
    for rank, tensor in enumerate(copies):
        if tensor is not None:
            contribute(lanes, [tensor], [Copy(0, ordinal, holders, rank, 1 / len(copies))])
    return bool(proof.disagreeing(lanes, total)[0])


@pytest.mark.parametrize("count", [2, 3, 4, 7, 64, 4096])
def test_coefficients_sum_to_zero_and_measure_the_difference(count):
    c = proof.coefficients(count)
    assert c.shape == (count, proof.SKETCH)
    assert c.sum(0).abs().max() < 1e-9
    torch.testing.assert_close(c.square().sum(0), torch.full((8,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("count", [2, 3, 4, 16])
@pytest.mark.parametrize("size", [1, 5, 8, 9, 64, 65, 10_000])
def test_equal_copies_agree_and_one_that_is_other_does_not(count, size):
    tensor = torch.randn(size)
    assert not differ([tensor.clone() for _ in range(count)])
    assert differ([tensor] * (count - 1) + [tensor.flip(0) * 2])


@pytest.mark.parametrize("size", [1, 8, 64, 100_000])
@pytest.mark.parametrize(("part", "found"), [(0.005, False), (0.02, True)])
def test_tolerance_of_the_tensors_own_size(size, part, found):
    tensor = torch.randn(size, dtype=torch.float64)
    tensor *= TOTAL / tensor.norm()
    assert differ([tensor, tensor * (1 + part)]) is found


@pytest.mark.parametrize("size", [1, 8, 64, 100_000])
@pytest.mark.parametrize(("part", "found"), [(2e-6, False), (5e-5, True)])
def test_tolerance_of_the_total_norm(size, part, found):
    """A gradient that is nothing but rounding noise may differ altogether."""
    noise = [torch.randn(size, dtype=torch.float64).abs() for _ in range(2)]
    noise = [n * TOTAL * part / n.norm() * sign for n, sign in zip(noise, (1, -1), strict=True)]
    assert differ(noise) is found


def test_noise_of_a_few_bfloat16_steps_passes():
    tensor = torch.randn(100_000).bfloat16()
    noisy = [tensor.float() * (1 + (torch.rand(100_000) - 0.5) * 2**-7) for _ in range(8)]
    assert not differ([n.bfloat16() for n in noisy])


def test_a_copy_that_is_missing_is_found_unless_it_is_zero():
    assert differ([torch.ones(4), None])
    assert not differ([torch.zeros(4), None])


def test_shards_whose_sums_of_squares_are_equal_are_found():
    assert differ([torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])])
    assert differ([torch.tensor([3.0, 4.0]), torch.tensor([3.0, -4.0])])


def test_swapped_tensors_are_found_even_in_one_slot():
    first, second = torch.randn(100), torch.randn(100)
    lanes = torch.zeros(1, proof.LANES, dtype=torch.float64)
    for rank, pair in enumerate([(first, second), (second, first)]):
        copies = [Copy(0, ordinal, (0, 1), rank, 0.5) for ordinal in (0, 512)]
        contribute(lanes, pair, copies)
    assert proof.disagreeing(lanes, TOTAL)[0]


def test_opposite_errors_do_not_cancel():
    tensor = torch.randn(100)
    error = torch.randn(100)
    assert differ([tensor + error, tensor - error, tensor, tensor])


def test_a_shared_slot_is_suspected_where_a_large_tensor_hides_a_small_one():
    large, small = torch.full((8,), 30.0), torch.full((8,), 0.1)
    lanes = torch.zeros(1, proof.LANES, dtype=torch.float64)
    for rank, factor in enumerate((1.0, 2.0)):
        copies = [Copy(0, ordinal, (0, 1), rank, 0.5) for ordinal in (0, 512)]
        contribute(lanes, [large, small * factor], copies)
    assert not proof.disagreeing(lanes, TOTAL)[0]
    assert proof.suspicious(lanes, TOTAL)[0]


def test_complex_and_half_tensors():
    tensor = torch.randn(50, dtype=torch.complex64)
    assert differ([tensor, tensor.conj()])
    half = torch.randn(50).half()
    assert not differ([half, half])


def of_tokens(rows, columns, tokens, dtype, seed, kept=1.0):
    """An embedding's gradient: nothing but in the tokens' rows, and there in a part of them."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.zeros(rows, columns)
    places = torch.randint(0, rows, (tokens,), generator=generator)
    values = torch.randn(tokens, columns, generator=generator)
    values *= torch.rand(tokens, columns, generator=generator) < kept
    return grad.index_add_(0, places, values).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 10, 1000])
@pytest.mark.parametrize(
    ("rows", "columns"), [(10, 64), (1000, 1), (1000, 5), (2000, 16), (777, 300), (10**6, 2)]
)
def test_gradients_of_few_rows_that_nobody_averaged_are_found(rows, columns, tokens, dtype):
    for seed in range(6 if rows < 10**6 else 1):
        grads = [of_tokens(rows, columns, tokens, dtype, 100 * seed + rank) for rank in range(4)]
        total = torch.stack(grads).double().norm()
        assert differ(grads, total, ordinal=seed)
        assert not differ([grads[0]] * 4, total, ordinal=seed)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(10, 3000),
    columns=st.integers(1, 200),
    seed=st.integers(0, 10**6),
    kept=st.sampled_from([1.0, 0.5]),
)
def test_one_token_on_each_of_two_ranks_is_enough(rows, columns, seed, kept):
    """Each row has a value in each lane, so that half of them may well be zero."""
    grads = [of_tokens(rows, columns, 1, torch.float32, seed + i, kept) for i in range(2)]
    if not torch.equal(*grads):
        assert differ(grads, torch.stack(grads).double().norm())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(10, 3000), columns=st.integers(1, 100), pair=st.tuples(*[st.integers(0)] * 2)
)
def test_rows_of_ones_at_other_places_are_found(rows, columns, pair):
    """Their sums of squares are equal."""
    places = [number % rows for number in pair]
    grads = [torch.zeros(rows, columns).index_fill_(0, torch.tensor(p), 1.0) for p in places]
    assert differ(grads, grads[0].double().norm()) is (places[0] != places[1])


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_a_few_bfloat16_steps_in_one_row_passes(seed):
    grad = of_tokens(500, 256, 1, torch.float32, seed)
    noisy = [grad * (1 + (torch.rand(500, 256) - 0.5) * 2**-7) for _ in range(4)]
    assert not differ([n.bfloat16() for n in noisy], grad.double().norm())


SHAPES = [(10, 64), (1024, 1024), (512, 1024), (3, 50), (50, 3), (17, 17), (1000, 12), (2000, 31)]
SHAPES += [(128, 2867), (40, 4099), (4, 30, 64), (64, 64, 3, 3), (900,), (64, 1), (8, 8)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_and_every_column_is_met(shape):
    numel, columns = samples.extent(torch.empty(shape), shape)
    places = torch.arange(numel)
    met = torch.cat([p.of(places).flatten() for p in samples.pieces(0, (numel, columns))])
    rows = torch.bincount(met.unique() // columns, minlength=numel // columns)
    assert rows.min() >= min(columns, samples.LANES)
    assert len((met % columns).unique()) == columns
    assert len(met) <= max(1.3 * numel if numel < 2000 else numel, 0) + 64


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ((128256, 4096), 1 << 20),
        ((1024, 1024), 8256),
        ((512, 512, 3, 3), 8256),
        ((10**9,), 1 << 21),
    ],
)
def test_a_sample_is_small(shape, values):
    extent = samples.extent(torch.empty(shape, device="meta"), shape)
    assert sum(64 * piece.blocks for piece in samples.pieces(0, extent)) <= values


def test_no_two_runs_of_a_block_have_the_same_signs():
    products = samples._signs() @ samples._signs().T
    assert products.fill_diagonal_(0).abs().max() <= 4


def test_large_tensors_are_folded_in_parts(monkeypatch):
    tensors = [torch.randn(300, 70), torch.randn(5), torch.randn(1000), torch.randn(0)]
    extents = [samples.extent(t, t.shape) for t in tensors]
    cpu, keys = torch.device("cpu"), [1, 2, 3, 4]
    whole = samples.Sampler(extents, keys, cpu).fold(tensors)
    monkeypatch.setattr(samples, "_CHUNK", 192)
    torch.testing.assert_close(samples.Sampler(extents, keys, cpu).fold(tensors), whole)


@pytest.mark.parametrize(
    "cut", [lambda b: b[:, 0], lambda b: b.view(-1)[::2], lambda b: b.T[:1], lambda b: b.t()]
)
@pytest.mark.parametrize("rows", [8, 300])
def test_a_sample_is_of_the_tensor_and_not_of_its_neighbours(cut, rows):
    tensor = cut(torch.randn(rows, 2))
    assert not differ([tensor, tensor.clone(memory_format=torch.contiguous_format)])
    alone = tensor.clone(memory_format=torch.contiguous_format)
    inside = torch.full((tensor.numel() + 200,), 1e9)[100:-100]
    assert not differ([inside.copy_(alone.flatten()).view(alone.shape), alone])
