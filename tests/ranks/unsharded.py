"""The check that most tests end in: a sharded clip does what the unsharded one would do."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardclip import GradClipper, clip_grad_norm_

from .collectives import Collective, count_collectives
from .gather import everywhere, same_everywhere
from .tensors import (
    Sharded,
    assert_same_values,
    coefficient,
    exact_norm,
    local_of,
    parameter,
    scaled,
)


def by_function(parameters: Sequence, max_norm: float, norm_type: float, **options) -> Tensor:
    """Count and clip with the function."""
    with count_collectives() as calls:
        norm = clip_grad_norm_(parameters, max_norm, norm_type, **options)
    assert_one_all_reduce(calls)
    return norm


def by_clipper(parameters: Sequence, max_norm: float, norm_type: float, **options) -> Tensor:
    """Count and clip with a clipper's first step."""
    clipper = GradClipper(parameters, max_norm, norm_type, **options)
    with count_collectives() as calls:
        result = clipper.clip_()
    assert_one_all_reduce(calls)
    return result.total_norm


CLIPS = {"function": by_function, "clipper": by_clipper}


def assert_one_all_reduce(calls: list[Collective]) -> None:
    """One all-reduce, nothing else, with as many elements on every rank."""
    assert [call.op for call in calls] == ["all_reduce"], calls
    sizes = everywhere((calls[0].numel, calls[0].dtype))
    assert all(size == sizes[0] for size in sizes), f"payloads differ: {sizes}"


def assert_norm(norm: Tensor, expected: float, rtol: float = 1e-6) -> None:
    """A plain 0-dim tensor with the same bits on every rank, and the right value."""
    assert type(norm) is Tensor, type(norm)
    assert norm.shape == ()
    assert norm.dtype in (torch.float32, torch.float64)
    assert not norm.requires_grad
    value = norm.item()
    assert same_everywhere(value.hex()), everywhere(value)
    if math.isnan(expected) or math.isinf(expected):
        assert math.isnan(value) == math.isnan(expected)
        assert math.isinf(value) == math.isinf(expected)
    else:
        assert abs(value - expected) <= rtol * expected, (value, expected)


def assert_clips_as_unsharded(
    tensors: Sequence[Sharded],
    norm_type: float = 2.0,
    clip: Callable = by_function,
    share: float = 0.5,
    **options,
) -> None:
    """Clip to a share of the exact norm and compare the norm and every local gradient."""
    expected = exact_norm([tensor.full for tensor in tensors], norm_type)
    max_norm = share * expected if math.isfinite(expected) and expected > 0 else share
    mine = [tensor for tensor in tensors if tensor.here]
    parameters = [parameter(tensor.build()) for tensor in mine]
    norm = clip(parameters, max_norm, norm_type, **options)
    assert_norm(norm, expected)
    factor = coefficient(expected, max_norm)
    assert not (math.isfinite(expected) and expected > 0) or factor < 1  # it did clip
    for tensor, clipped in zip(mine, parameters, strict=True):
        assert_gradient(clipped, tensor, factor)


def assert_gradient(clipped: nn.Parameter, tensor: Sharded, factor: float) -> None:
    """This rank's gradient is its piece of the unsharded gradient times the factor."""
    expected = local_of(tensor.build(scaled(tensor.full, factor)))
    assert type(clipped.grad) is type(tensor.build())
    assert_same_values(local_of(clipped.grad), expected)
