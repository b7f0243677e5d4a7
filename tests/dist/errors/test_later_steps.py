"""What goes wrong in a later step, on one rank, or in the middle of one: nobody hangs."""

import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardclip import GradClipper, ReplicaMismatchError, get_total_norm, global_norm
from shardclip.step import overlap
from tests.ranks import on_ranks, raised_everywhere
from tests.ranks.clippers import counted, shard
from tests.ranks.tensors import exact_norm, local_of, mesh_of, parameter, sharded
from tests.ranks.unsharded import assert_norm

R, S0 = Replicate(), Shard(0)


@pytest.mark.parametrize("missing", [0, 1])
@on_ranks(2)
def test_a_list_with_none_on_one_rank_where_the_others_have_zeros(missing):
    mesh = mesh_of(2)
    held = [sharded(torch.full((20_000,), float(k)), mesh, [R]) for k in range(5)]
    if dist.get_rank() == missing:
        held[0] = None
    assert_norm(global_norm(held), math.sqrt(20_000 * 30))


@on_ranks(2)
def test_many_small_copies_in_a_function_are_read_by_both():
    mesh = mesh_of(2)
    full = [torch.full((n,), 1.0 + n) for n in (1, 2, 3, 1, 1, 700, 33_000)]
    assert_norm(get_total_norm([sharded(f, mesh, [R]) for f in full]), exact_norm(full))


@on_ranks(2)
def test_a_number_without_a_value_on_one_rank():
    made = shard([3.0, 4.0])
    clipper = GradClipper([("w", made)], 1.0, also=("n",))
    counted(clipper)
    value = torch.ones((), device="meta") if dist.get_rank() else 1.0
    raised_everywhere(lambda: clipper.clip_(also={"n": value}), ValueError, "rank 1")
    counted(clipper)


def _out_of_memory(*_):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("where", ["locals_of", "readings"])
@on_ranks(2)
def test_a_failure_while_summing_on_one_rank(where):
    made = shard([3.0, 4.0])
    clipper = GradClipper([("w", made)], 1.0)
    patch = pytest.MonkeyPatch()
    if dist.get_rank() == 1:
        patch.setattr(f"shardclip.step.measure.{where}", _out_of_memory)
    try:
        raised_everywhere(clipper.clip_, ValueError, "out of memory", "rank 1")
    finally:
        patch.undo()
    assert_norm(clipper.clip_().total_norm, 5.0)


@on_ranks(2)
def test_a_gradient_that_shares_its_memory_in_a_later_step():
    made = parameter(torch.ones(4, 3))
    clipper = GradClipper([("w", made)], 0.1)
    counted(clipper)
    made.grad = torch.ones(4, 1).expand(4, 3) if dist.get_rank() else torch.ones(4, 3)
    raised_everywhere(clipper.clip_, ValueError, "share memory", "rank 1")


@pytest.mark.parametrize("beside", ["dense", "sparse"])
@on_ranks(2)
def test_a_dtensor_whose_local_part_shares_its_memory_in_a_later_step(beside):
    made, other = shard([[3.0] * 3, [4.0] * 3]), parameter(torch.ones(4))
    if beside == "sparse":
        other.grad = torch.ones(4).to_sparse()
    clipper = GradClipper([("w", made), ("other", other)], 0.1)
    for _ in range(2):
        counted(clipper)
    whole = torch.ones(1, 1) if dist.get_rank() else torch.ones(1, 3)
    known = {"shape": made.shape, "stride": made.stride(), "run_check": False}  # the same spec
    made.grad = DTensor.from_local(whole.expand(1, 3), mesh_of(2), [S0], **known)
    raised_everywhere(clipper.clip_, ValueError, "w: .*share memory", "rank 1")
    assert local_of(made.grad).tolist() == [[1.0] * 3]


class _Unknown(torch.Tensor):
    pass


@on_ranks(2)
def test_an_unknown_kind_of_gradient_in_a_later_step():
    made = parameter(torch.ones(4))
    clipper = GradClipper([("w", made)], 0.1)
    counted(clipper)
    made.grad = torch.ones(4).as_subclass(_Unknown) if dist.get_rank() else torch.ones(4)
    raised_everywhere(clipper.clip_, (TypeError, ValueError), "_Unknown")


@pytest.mark.parametrize("kind", ["strided float64", "conjugate", "sparse"])
@on_ranks(4)
def test_drift_of_every_kind_is_described(kind):
    spoil = dist.get_rank() == 2
    if kind == "strided float64":
        grad = torch.arange(20.0, dtype=torch.float64)[::2] + 1
        grad[3] += spoil * 1e-9
    elif kind == "conjugate":
        grad = torch.arange(1.0, 9.0).to(torch.complex64).conj()
        grad = grad + 1e-6j if spoil else grad
    else:
        grad = torch.sparse_coo_tensor(
            [[1 if spoil else 0]], torch.ones(1), (4,), check_invariants=True
        )
    made = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    made.grad = grad
    clipper = GradClipper([("w", made)], 1e9, check_replicas=True)
    raised_everywhere(clipper.clip_, ReplicaMismatchError, "w: rank 2 differs")


@on_ranks(2)
def test_exact_copies_of_any_size():
    made = parameter(torch.full((10,), 1e100, dtype=torch.float64))
    assert float(global_norm([made.grad], exact=True)) == 1e100 * math.sqrt(10)
    result = GradClipper([("w", made)], 1.0, exact=True).clip_()
    assert result.finite
    assert abs(float(made.grad.norm()) - 1) < 1e-12


@on_ranks(2)
def test_a_started_step_that_nobody_can_finish_is_dropped():
    clipper = GradClipper([("w", shard([3.0, 4.0]))], 1.0)
    pending = clipper.start()
    with pytest.raises(RuntimeError, match="under way"):
        clipper.clip_()
    del pending
    gc.collect()
    assert_norm(clipper.clip_().total_norm, 5.0)


@on_ranks(2)
def test_an_optimizer_that_fails_on_one_rank_does_not_part_the_ranks():
    made = shard([3.0, 4.0])
    optimizer = torch.optim.SGD([made], lr=0.1)
    clipper = GradClipper([("w", made)], 1e9, check_replicas=2)

    def fail(*_):
        raise OSError

    hook = optimizer.register_step_pre_hook(fail) if dist.get_rank() == 0 else None
    try:
        clipper.step(optimizer)
    except OSError:
        hook.remove()
    for _ in range(3):
        clipper.step(optimizer)


@on_ranks(2)
def test_inference_mode_and_out_of_it():
    made = [shard([3.0, 4.0]), parameter(torch.ones(5).bfloat16())]
    clipper = GradClipper(list(zip("ab", made, strict=True)), 1e9)
    with torch.inference_mode():
        counted(clipper)
    assert_norm(counted(clipper).total_norm, math.sqrt(30))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@on_ranks(2)
def test_complex_magnitudes_beyond_their_own_dtype(p):
    full = torch.tensor([3 + 4j, 3e38 + 3e38j, 0, 1j], dtype=torch.complex64)
    wide = full.to(torch.complex128).abs()
    expected = float(torch.linalg.vector_norm(wide, p))
    held = sharded(full, mesh_of(2), [S0])
    found = float(get_total_norm([held], p))
    assert found == pytest.approx(expected, rel=1e-6) or (found == math.inf and expected > 3.4e38)
    result = GradClipper([parameter(held)], 1.0, p).clip_()
    assert result.clipped_norm == pytest.approx(1.0, rel=1e-6)


@on_ranks(2)
def test_overlap_survives_the_accumulation_into_small_neighbours():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        fully_shard(layer, mesh=mesh_of(2))
    fully_shard(model, mesh=mesh_of(2))
    small, overlap.SMALL = overlap.SMALL, 1000  # the biases are below it
    try:
        clipper = GradClipper(model, 1e9, overlap=True)
        for micro_batches in (1, 3):
            model.zero_grad()
            for _ in range(micro_batches):
                model(torch.randn(3, 64)).square().sum().backward()
            clipper._collector.overlap.drop_outdated([p.grad for p in model.parameters()])
            valid = len(clipper._collector.overlap.early)
            assert valid == (2 if micro_batches == 3 else 0)
            full = [p.grad.full_tensor() for p in model.parameters()]
            assert_norm(clipper.clip_().total_norm, exact_norm(full))
    finally:
        overlap.SMALL = small


@on_ranks(2)
def test_what_is_no_optimizer_is_refused():
    clipper = GradClipper([("w", shard([3.0, 4.0]))], 1.0)
    with pytest.raises(TypeError, match="optimizer must be"):
        clipper.step([1])
