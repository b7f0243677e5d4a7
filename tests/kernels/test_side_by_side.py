"""Gradients without a gap in one storage are read as one tensor, as long as they lie so."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardclip import kernels
from shardclip.kernels import blocked


class _Counted(TorchDispatchMode):
    """Counts calls by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def views(sizes, dtype=torch.float32, gap=0, seed=0):
    """Tensors that lie in one storage, as FSDP2's reduce-scatter leaves them."""
    total = sum(sizes) + gap * len(sizes)
    flat = torch.randn(total, generator=torch.Generator().manual_seed(seed)).to(dtype)
    out, place = [], 0
    for size in sizes:
        out.append(flat[place : place + size].view(1, size))
        place += size + gap
    return out


def exact(tensors):
    return sum(float(t.double().square().sum()) for t in tensors)


def called(kernel, tensors):
    with torch.no_grad(), _Counted() as counted:
        found = kernel(tensors, 2.0)
    return float(found[0]), counted.calls


SIZES = [4096, 256 * 300, 40_000, 7, 512]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [1, -1])
def test_neighbours_are_read_as_one(dtype, order):
    tensors = views(SIZES, dtype)[::order]
    kernel = kernels.build(tensors, [0] * len(tensors), 1)
    found, calls = called(kernel, tensors)
    assert abs(found - exact(tensors)) <= 2e-6 * exact(tensors)
    assert "cat" not in calls
    assert calls.count("linalg_vector_norm") <= 2 * math.ceil(sum(SIZES) / blocked._BUFFER)


def test_a_gap_is_never_read():
    tensors = views(SIZES, gap=1)
    gaps = tensors[0].new_full((), math.nan)
    whole = tensors[0]._base if tensors[0]._base is not None else tensors[0]
    flat = whole.as_strided((sum(SIZES) + len(SIZES),), (1,), 0)
    place = 0
    for size in SIZES:
        flat[place + size] = gaps
        place += size + 1
    found, _ = called(kernels.build(tensors, [0] * len(tensors), 1), tensors)
    assert abs(found - exact(tensors)) <= 2e-6 * exact(tensors)


def test_each_step_has_new_gradients_and_some_lie_apart():
    tensors = views(SIZES)
    kernel = kernels.build(tensors, [0] * len(tensors), 1)
    steps = [views(SIZES, seed=1), [t.clone() for t in views(SIZES, seed=2)], views(SIZES, seed=3)]
    steps.append(views(SIZES, seed=4)[::-1][::-1])
    mixed = views(SIZES, seed=5)
    mixed[2] = mixed[2].clone()
    steps.append(mixed)
    for step in [*steps, *steps]:
        found, _ = called(kernel, step)
        assert abs(found - exact(step)) <= 2e-6 * exact(step)


def test_where_they_move_in_every_step_nobody_looks_any_more():
    first = views(SIZES)
    first[0] = first[0].clone()
    second = views(SIZES, seed=1)
    second[-1] = second[-1].clone()
    kernel = kernels.build(first, [0] * len(first), 1)
    for step in range(2 * blocked._PATIENCE):
        tensors = second if step % 2 else first
        found, _ = called(kernel, tensors)
        assert abs(found - exact(tensors)) <= 2e-6 * exact(tensors)
        assert any(run.offsets for run in kernel._runs) == (step < blocked._PATIENCE)


def test_a_tensor_of_other_strides_in_the_same_place():
    tensors = views([64, 64])
    kernel = kernels.build(tensors, [0, 0], 1)
    turned = [t.view(8, 8).t().reshape(1, 64) for t in tensors]
    found, _ = called(kernel, turned)
    assert abs(found - exact(turned)) <= 2e-6 * exact(turned)


def test_a_neighbour_that_begins_in_the_same_place_but_has_gaps():
    flat = torch.arange(24.0)
    kernel = kernels.build([flat[0:8], flat[8:16]], [0, 0], 1)
    apart = [flat[0:8], flat[8:24:2]]
    found, _ = called(kernel, apart)
    assert abs(found - exact(apart)) <= 2e-6 * exact(apart)


def test_buckets_are_kept_apart():
    tensors = views(SIZES)
    kernel = kernels.build(tensors, [0, 1, 0, 1, 1], 2)
    found = kernel(tensors, 2.0).tolist()
    for bucket, held in enumerate(([0, 2], [1, 3, 4])):
        expected = exact([tensors[i] for i in held])
        assert abs(found[bucket] - expected) <= 2e-6 * expected


@pytest.mark.parametrize("p", [0.0, 1.0, 3.0, math.inf])
def test_other_norms(p):
    tensors = views(SIZES)
    found = float(kernels.build(tensors, [0] * len(tensors), 1)(tensors, p)[0])
    flat = torch.cat([t.double().flatten() for t in tensors])
    expected = float(torch.linalg.vector_norm(flat, p))
    expected = expected if p in (0, 1) or math.isinf(p) else expected**p
    assert abs(found - expected) <= 1e-6 * expected
