"""The proof that copies are copies: what it must find and what it must let pass."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from shardclip import (
    SELF,
    GradClipper,
    NonFiniteGradientError,
    ReplicaMismatchError,
    clip_grad_norm_,
)
from tests.ranks import count_collectives, everywhere, on_ranks, raised_everywhere
from tests.ranks.tensors import R, labelled, local_of, mesh_of, parameter
from tests.ranks.unsharded import CLIPS, assert_norm, assert_one_all_reduce

BOTH = pytest.mark.parametrize("clip", CLIPS)
KINDS = pytest.mark.parametrize("kind", ["plain", "Replicate", "left out"])
SIZES = pytest.mark.parametrize("size", [1, 2, 3, 100, 5000, 200_000])


def declared(kind: str, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is taken for a copy of the other rank's, for one of the three reasons."""
    if kind == "plain":
        return local
    mesh = mesh_of(2) if kind == "Replicate" else mesh_of(1, 2, names=("dp", "tp"))["dp"]
    return labelled(local, mesh, R)


def module_of(kind: str, *locals_: torch.Tensor) -> nn.ParameterDict:
    return nn.ParameterDict(
        {f"weight{i}": parameter(declared(kind, local)) for i, local in enumerate(locals_)}
    )


def assert_found(clip: str, module: nn.Module, *names: str) -> None:
    """Every rank raises alike, and the gradients are as they were."""
    before = [local_of(one.grad).clone() for one in module.parameters()]
    message = raised_everywhere(
        lambda: CLIPS[clip](module, 1e-3, 2.0), ReplicaMismatchError, "layout", *names
    )
    for one, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(local_of(one.grad), old), message


def assert_passes(clip: str, module: nn.Module, rtol: float = 2e-3) -> None:
    """The norm is one of the copies', the same on both ranks."""
    before = [local_of(one.grad).double() for one in module.parameters()]
    expected = math.sqrt(sum(float(one.square().sum()) for one in before))
    norm = CLIPS[clip](module, everywhere(expected)[0] / 2, 2.0)  # a setting: alike on all ranks
    assert abs(norm.item() - expected) <= rtol * expected
    for one, old in zip(module.parameters(), before, strict=True):
        assert one.grad.dtype != torch.float32 or torch.allclose(
            local_of(one.grad).double(), old / 2, rtol=rtol, atol=0
        )


def is_second() -> bool:
    return dist.get_rank() == 1


def random_by_rank(size: int) -> torch.Tensor:
    torch.manual_seed(100 + dist.get_rank())
    return torch.randn(size)


@KINDS
@SIZES
@BOTH
@on_ranks(2)
def test_a_tenth_more_is_found(kind, size, clip):
    copy = torch.randn(size)
    assert_found(clip, module_of(kind, copy * 1.1 if is_second() else copy), "weight0")


@KINDS
@SIZES
@BOTH
@on_ranks(2)
def test_a_thousandth_more_passes(kind, size, clip):
    copy = torch.randn(size)
    assert_passes(clip, module_of(kind, copy * 1.001 if is_second() else copy))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("relative", "found"), [(0.1, True), (1e-3, False)])
@on_ranks(2)
def test_noise_of_either_size_in_every_element(seed, relative, found):
    torch.manual_seed(seed)
    copy, noise = torch.randn(2, 3000)
    module = module_of("plain", copy + relative * noise if is_second() else copy)
    (assert_found if found else assert_noise_passes)("function", module)


def assert_noise_passes(clip: str, module: nn.Module) -> None:
    norm = CLIPS[clip](module, 1e9, 2.0).item()
    assert norm == pytest.approx(module["weight0"].grad.norm().item(), rel=1e-3)


@pytest.mark.parametrize(
    ("share", "found"), [(1e-3, True), (1e-4, True), (1e-6, False), (1e-8, False)]
)
@KINDS
@BOTH
@on_ranks(2)
def test_gradients_that_differ_wholly_matter_by_their_share_of_the_total(kind, share, found, clip):
    """A gradient that is nothing but rounding noise is another one on every rank."""
    noise = random_by_rank(500)
    main = torch.full((500,), 2.0)
    noise *= share * main.norm() / noise.norm()
    module = module_of(kind, main, noise)
    if found:
        assert_found(clip, module, "weight1")
    else:
        expected = main.norm().item()
        assert CLIPS[clip](module, expected / 2, 2.0).item() == pytest.approx(expected, rel=1e-6)
        assert local_of(module["weight0"].grad)[0].item() == pytest.approx(1.0, rel=1e-5)


@KINDS
@BOTH
@on_ranks(2)
def test_an_ulp_of_bfloat16_everywhere_passes(kind, clip):
    """Kernels that add in another order differ so; 20 tensors, each must pass."""
    copies = [torch.randn(400).bfloat16() for _ in range(20)]
    if is_second():
        for copy in copies:
            copy.view(torch.int16).add_(torch.randint(-1, 2, (400,), dtype=torch.int16))
    assert_passes(clip, module_of(kind, *copies))


@KINDS
@BOTH
@on_ranks(2)
def test_shards_of_one_tensor_are_found_though_their_norms_are_nearly_equal(kind, clip):
    halves = torch.randn(2, 100_000)
    assert halves[0].norm().item() == pytest.approx(halves[1].norm().item(), rel=1e-2)
    assert_found(clip, module_of(kind, halves[dist.get_rank()].clone()), "weight0")


SECOND_COPY = {
    "swapped halves": lambda x: torch.cat(x.chunk(2)[::-1]),
    "reversed": lambda x: x.flip(0),
    "sign": lambda x: -x,
    "opposite errors": lambda x: x + torch.tensor([1.0, -1.0]).repeat(len(x) // 2) * x.std(),
    "zeros": torch.zeros_like,
    "shifted by one": lambda x: x.roll(1),
}


@pytest.mark.parametrize("how", SECOND_COPY)
@pytest.mark.parametrize("size", [4, 1000])
@KINDS
@on_ranks(2)
def test_differences_that_cancel_in_sums_are_found(how, size, kind):
    copy = torch.randn(size)
    second = SECOND_COPY[how](copy)
    assert_found("function", module_of(kind, second if is_second() else copy), "weight0")


@pytest.mark.parametrize("how", ["swapped", "opposite errors"])
@KINDS
@BOTH
@on_ranks(2)
def test_differences_that_cancel_between_two_tensors_are_found(how, kind, clip):
    one, other = torch.randn(2, 300)
    if how == "swapped" and is_second():
        one, other = other, one
    elif is_second():
        delta = torch.randn(300)
        one, other = one + delta, other - delta
    assert_found(clip, module_of(kind, one, other), "weight0", "weight1")


@pytest.mark.parametrize("which", [0, 37, 299])
@KINDS
@BOTH
@on_ranks(2)
def test_one_of_three_hundred_is_found_and_named(which, kind, clip):
    copies = [torch.randn(20) for _ in range(300)]
    if is_second():
        copies[which] = torch.randn(20)
    assert_found(clip, module_of(kind, *copies), rf"weight{which}\b")


@pytest.mark.parametrize("rank", [0, 2, 3])
@BOTH
@on_ranks(4)
def test_one_rank_of_four_is_found(rank, clip):
    copy = torch.randn(50)
    grad = torch.randn(50) if dist.get_rank() == rank else copy
    assert_found(clip, nn.ParameterDict({"head": parameter(grad)}), "head")


@pytest.mark.parametrize("kind", ["plain", "Replicate"])
@BOTH
@on_ranks(2)
def test_a_copy_that_one_rank_does_not_have_is_found(kind, clip):
    """A branch that only one rank took: its gradient was not synchronised."""
    module = module_of(kind, torch.full((5,), 2.0), torch.full((5,), 3.0))
    if is_second():
        module["weight0"].grad = None
    raised_everywhere(lambda: CLIPS[clip](module, 1e-3, 2.0), ReplicaMismatchError, "weight0")
    assert local_of(module["weight1"].grad)[0].item() == 3.0


@BOTH
@on_ranks(2)
def test_a_parameter_that_no_rank_uses_shifts_nothing(clip):
    module = module_of("plain", torch.ones(3), torch.full((4,), 2.0), torch.full((3,), 3.0))
    module["weight1"].grad = None
    assert_norm(CLIPS[clip](module, 1e9, 2.0), math.sqrt(30))


@KINDS
@BOTH
@on_ranks(2)
def test_a_maximum_needs_no_proof(kind, clip):
    module = module_of(kind, torch.tensor([3.0, -7.0] if is_second() else [5.0, 1.0]))
    assert_norm(CLIPS[clip](module, 1e9, math.inf), 7.0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@KINDS
@on_ranks(2)
def test_the_non_finite_policy_comes_first(bad, kind):
    """On one rank only, so the copies differ as well."""

    def module():
        return module_of(kind, torch.tensor([bad if is_second() else 1.0, 2.0]))

    for clip in CLIPS.values():
        norm = clip(module(), 1.0, 2.0).item()
        assert norm == bad or math.isnan(norm)
    raised_everywhere(
        lambda: clip_grad_norm_(module(), 1.0, error_if_nonfinite=True), RuntimeError, "finite"
    )
    raised_everywhere(
        lambda: GradClipper(module(), 1.0, nonfinite="raise").clip_(), NonFiniteGradientError
    )
    assert GradClipper(module(), 1.0, nonfinite="skip").clip_().skipped


@on_ranks(2)
def test_this_rank_alone_has_no_copies():
    made = parameter(torch.tensor([3.0, 4.0]) * (1 + dist.get_rank()))
    assert clip_grad_norm_([made], 1.0, group=SELF).item() == pytest.approx(5.0 * (1 + is_second()))


@KINDS
@on_ranks(2)
def test_a_clipper_finds_a_later_drift_at_once_or_in_the_next_step(kind):
    """The gradients stay as they are, no norm is reported, and every rank raises alike."""
    module = module_of(kind, torch.randn(40), torch.randn(40))
    clipper = GradClipper(module, 1e-3)
    for _ in range(3):
        clipper.clip_()
    drifted = random_by_rank(40)
    local_of(module["weight1"].grad).copy_(drifted)

    def step_until_it_raises():
        for _ in range(2):
            with count_collectives():
                result = clipper.clip_()
            assert result.total_norm.isnan()
            assert torch.equal(local_of(module["weight1"].grad), drifted)

    raised_everywhere(step_until_it_raises, ReplicaMismatchError, "weight1")
    assert torch.equal(local_of(module["weight1"].grad), drifted)


@on_ranks(2)
def test_a_clipper_proves_what_a_layout_says_is_replicated():
    mesh = mesh_of(2)
    pairs = [("weight", parameter(random_by_rank(40)))]
    clipper = GradClipper(pairs, 1.0, layout=(mesh, [R]))
    raised_everywhere(clipper.clip_, ReplicaMismatchError, "weight")


@BOTH
@on_ranks(2)
def test_the_proof_travels_in_the_one_all_reduce(clip):
    module = module_of("plain", *torch.randn(10, 5))
    with count_collectives() as calls:
        clip_grad_norm_(module, 1.0)
    assert_one_all_reduce(calls)


def looked_up(rows: int, columns: int, tokens: int, dtype: torch.dtype, step: int) -> torch.Tensor:
    """An embedding's gradient of this rank's own tokens: ones, in their rows alone."""
    torch.manual_seed(1000 * step + dist.get_rank())
    embedding = nn.Embedding(rows, columns, dtype=dtype)
    embedding(torch.randint(0, rows, (tokens,))).sum().backward()
    return embedding.weight.grad


def by_rows(kind: str, grad: torch.Tensor) -> torch.Tensor:
    """Take it for a copy of other ranks', for one of the reasons."""
    if kind == "plain":
        return grad
    if kind == "hsdp":
        mesh = mesh_of(2, 2)
        half = grad.chunk(2)[mesh.get_local_rank(1)].clone()
        return labelled(half, mesh, R, Shard(0))
    return labelled(grad, mesh_of(4), R)


@pytest.mark.parametrize("kind", ["plain", "hsdp", "Replicate"])
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(128256, 16, 64), (1000, 96, 4)])
@BOTH
@on_ranks(4)
def test_an_embedding_that_nobody_averages_is_found_in_every_step(
    kind, rows, columns, tokens, clip
):
    for step in range(12):
        dtype = torch.bfloat16 if step % 2 else torch.float32
        grad = by_rows(kind, looked_up(rows, columns, tokens, dtype, step))
        assert_found(clip, nn.ParameterDict({"embedding": parameter(grad)}), "embedding")


@pytest.mark.parametrize("late", [False, True])
@on_ranks(4)
def test_an_embedding_that_fully_shard_does_not_know_is_found_in_every_step(late):
    model = nn.Sequential(nn.Embedding(5000, 32), nn.Linear(32, 32))
    embedding = model[0].weight
    if late:
        model = nn.Sequential(model[1])
    fully_shard(model, mesh=mesh_of(4), ignored_params=None if late else {embedding})
    if late:
        model.insert(0, nn.Embedding.from_pretrained(embedding.detach(), freeze=False))
    for step in range(12):
        model.zero_grad()
        torch.manual_seed(step * 10 + dist.get_rank())
        model(torch.randint(0, 5000, (8,))).square().sum().backward()
        raised_everywhere(
            lambda: clip_grad_norm_(model, 1e-3), ReplicaMismatchError, r"0\.weight", "fully_shard"
        )


@pytest.mark.parametrize("same", [True, False])
@on_ranks(2)
def test_sparse_copies_at_other_rows_are_found(same):
    row = 5 if same else 5 + dist.get_rank()
    grad = torch.sparse_coo_tensor([[row]], torch.ones(1, 16), (100, 16), check_invariants=True)
    module = nn.ParameterDict({"embedding": nn.Parameter(torch.zeros(100, 16))})
    module["embedding"].grad = grad
    if same:
        assert clip_grad_norm_(module, 1e9).item() == pytest.approx(4.0)
    else:
        raised_everywhere(lambda: clip_grad_norm_(module, 1.0), ReplicaMismatchError, "embedding")
