"""Clipping tensor by tensor, each by its own norm over all ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardclip import compat
from shardclip.comm import Group
from shardclip.layout import Layout, adapters
from shardclip.math import norm
from shardclip.rules import thresholds
from shardclip.step import ClipResult, Judged, scale_

from .clipper import GradClipper
from .functions import Parameters

TensorLimit = float | Callable[[Tensor], float]
"""A threshold for every tensor, or a function from the parameter to its own."""


class PerTensorClipper:
    """Clip each parameter's gradient by its own norm over all ranks, every step.

    ``grad *= min(1, max_norm / (norm(grad) + 1e-6))``, tensor by tensor. Two ranks with shards
    [3] and [4] of one parameter, and [0.1] and [0] of another, and ``max_norm=1``: the first keeps
    [0.6] and [0.8], the second is left alone.

    Args:
        parameters: As for ``GradClipper``, without param groups.
        max_norm: The largest norm of a tensor that is left alone; or a function from the parameter
            to that, the same on every rank that holds it. ``lambda p: rms * p.numel() ** 0.5``
            bounds the root of the mean square (a DTensor's ``numel`` is the whole tensor's).
        norm_type: 0 (counts non-zeros), any p > 0, or inf.
        group: As for ``GradClipper``.
        layout: As for ``GradClipper``.

    Raises:
        ValueError, TypeError: As ``GradClipper``.

    Communication:
        Building it communicates once, as for ``GradClipper``; each ``clip_()`` is one all-reduce,
        with one number for each parameter more.

    References:
        ``optax.clip_by_block_rms``, which bounds each array's root of the mean square.
    """

    def __init__(
        self,
        parameters: Parameters,
        max_norm: TensorLimit,
        norm_type: float = 2.0,
        *,
        group: Group = None,
        layout: Layout = None,
    ) -> None:
        self._clipper = _Clipper(parameters, max_norm, norm_type, group=group, layout=layout)

    def clip_(self) -> dict[str, Tensor]:
        """Clip the gradients in place.

        Returns:
            Each parameter's norm before clipping, over all ranks and of all ranks' parameters, by
            name; 0-dim float64 tensors.

        Raises:
            ValueError: ``max_norm`` gave a negative number or NaN; or, on every rank alike, a
                gradient is Partial, on meta or of integer dtype.
            ReplicaMismatchError: As ``GradClipper.clip_``.
            Whatever is raised, no gradient was touched.

        Communication:
            One all-reduce. Host syncs on CUDA: one on the first step after the set of gradients
            changes, else none.
        """
        self._clipper.clip_()
        return self._clipper.norms_by_name


def clip_grad_per_tensor_norm_(
    parameters: Parameters,
    max_norm: TensorLimit,
    norm_type: float = 2.0,
    *,
    group: Group = None,
    layout: Layout = None,
) -> dict[str, Tensor]:
    """Clip each parameter's gradient by its own norm over all ranks, in place.

    ``grad *= min(1, max_norm / (norm(grad) + 1e-6))``; an example is at ``PerTensorClipper``.

    Args:
        parameters: As in ``clip_grad_norm_``.
        max_norm: The largest norm of a tensor that is left alone, or a function from the parameter
            to that: see ``PerTensorClipper``.
        norm_type: 0 (counts non-zeros), any p > 0, or inf.
        group: As in ``clip_grad_norm_``.
        layout: As in ``clip_grad_norm_``.

    Returns:
        Each parameter's norm before clipping, by name, as ``PerTensorClipper.clip_``.

    Raises:
        ValueError, TypeError, ReplicaMismatchError: As ``PerTensorClipper`` and its ``clip_``.

    Communication:
        A few all-gathers, in which the ranks agree on names, and one all-reduce. In a training loop
        build a ``PerTensorClipper`` once: then each step is one all-reduce. One host sync on CUDA.

    References:
        As ``PerTensorClipper``.
    """
    return PerTensorClipper(parameters, max_norm, norm_type, group=group, layout=layout).clip_()


class _Clipper(GradClipper):
    """Measures as a GradClipper does, and scales tensor by tensor."""

    def __init__(
        self, parameters: Parameters, max_norm: TensorLimit, norm_type: float, **where: Any
    ) -> None:
        if not callable(max_norm):
            norm.check_max_norm(max_norm)
        self._each = max_norm
        self.norms_by_name: dict[str, Tensor] = {}
        super().__init__(parameters, None, norm_type, norms="parameter", **where)
        self._alike = {"max_norm of each tensor": thresholds.named([max_norm])}

    def _scale(self, judged: Judged, apart: frozenset[int] = frozenset()) -> None:
        """Multiply each tensor by its own coefficient."""
        measured = judged.measured
        keys = [measured.plan.buckets[seat.bucket].key or 0 for seat in measured.plan.seats]
        if not keys:
            return
        limits = tuple(self._limit(seat.source.parameter) for seat in measured.plan.seats)
        norms = measured.norms[measured.plan.lanes.groups :]
        own = norms.index_select(0, compat.constant(tuple(keys), torch.int64, norms.device))
        coefs = norm.clip_coef(own, compat.constant(limits, torch.float64, norms.device))
        if judged.stops is not None:
            coefs = torch.where(judged.stops, 1.0, coefs)
        factors = coefs.tolist() if measured.read else coefs.unbind()
        for tensor, factor in zip(measured.local, factors, strict=True):
            scale_([adapters.storage(tensor)], factor)

    def _limit(self, parameter: Tensor) -> float:
        limit = self._each(parameter) if callable(self._each) else self._each
        return norm.check_max_norm(limit, "max_norm of a tensor")

    def _report(self, judged: Judged) -> ClipResult:
        result = super()._report(judged)
        norms = judged.measured.norms[judged.measured.plan.lanes.groups :]
        self.norms_by_name = dict(zip(self._agreed.keys, norms.unbind(), strict=True))
        return result
