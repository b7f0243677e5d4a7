"""Sums that ranks make apart have the same bits, however their tensors lie in memory."""

import pytest
import torch

from shardclip import kernels

SIZES = [(5, 3), (5,), (7, 5), (7,), (7,), (7,), (2, 7), (2,), (300, 5), (256,)]


def apart(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def side_by_side(tensors):
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def total(build, tensors):
    return float(build(tensors, [0] * len(tensors), 1)(tensors, 2.0))


def differing(build):
    found = [(total(build, apart(s)), total(build, side_by_side(apart(s)))) for s in range(20)]
    assert all(one == pytest.approx(other, rel=1e-6) for one, other in found)
    return sum(one != other for one, other in found)


def test_the_bits_do_not_depend_on_the_place():
    assert differing(kernels.build) > 0  # what is read together is rounded together
    assert differing(kernels.build_alike) == 0
