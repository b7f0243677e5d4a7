"""Adaptive gradient clipping: each unit's gradient against its own weights."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardclip import compat
from shardclip.comm import Group, reduce
from shardclip.errors import problem
from shardclip.layout import Layout, Source, dtensor
from shardclip.math import norm
from shardclip.step import Judged, verdict

from .clipper import GradClipper
from .functions import Parameters


class AdaptiveGradClipper:
    """Clip each unit's gradient by the norm of its own weights over all ranks, every step.

    A unit is a row: what one index of a tensor's first dim selects (a neuron's or an output
    channel's weights); tensors of at most one dim are one unit. Where ``norm(g) > clip_factor *
    max(norm(w), eps)`` the unit's gradient is scaled down to that, else it is left alone. Two ranks
    with the columns [3] and [4] of a weight and [30] and [40] of its gradient, ``clip_factor=1``:
    the norms are 5 and 50, and both gradients are divided by 10.

    The paper leaves the last layer out: pass the other parameters.

    Args:
        parameters: As for ``GradClipper``, without param groups. FSDP1's are refused: its flat
            pieces cut through rows.
        clip_factor: Lambda in the paper.
        eps: What a weight norm counts at least, so that zeros can grow.
        group: As for ``GradClipper``.
        layout: As for ``GradClipper``.

    Raises:
        ValueError, TypeError: As ``GradClipper``, on every rank alike, or an argument is wrong.

    Communication:
        Building it communicates as for ``GradClipper``, and two all-gathers more. Each ``clip_()``
        makes one all-reduce as ``GradClipper`` does, and where units are split over ranks a second
        one with two float64 numbers for each of those.

    References:
        Brock et al., 2021, arXiv:2102.06171, equation 3; ``optax.adaptive_grad_clip``, whose units
        are columns, as JAX stores weights.
    """

    def __init__(
        self,
        parameters: Parameters,
        clip_factor: float = 0.01,
        eps: float = 1e-3,
        *,
        group: Group = None,
        layout: Layout = None,
    ) -> None:
        self._clipper = _Clipper(parameters, clip_factor, eps, group=group, layout=layout)

    def clip_(self) -> Tensor:
        """Clip the gradients in place.

        Returns:
            The total norm before clipping, as ``clip_grad_norm_``.

        Raises:
            ValueError, TypeError: On every rank alike, a gradient is sparse, laid out otherwise
                than its parameter, Partial, on meta or of integer dtype.
            ReplicaMismatchError: As ``GradClipper.clip_``.
            Whatever is raised, no gradient was touched.

        Communication:
            One all-reduce, two where units are split over ranks. Host syncs on CUDA: one on the
            first step after the set of gradients changes, else none.
        """
        return self._clipper.clip_().total_norm


def adaptive_clip_grad_(
    parameters: Parameters,
    clip_factor: float = 0.01,
    eps: float = 1e-3,
    *,
    group: Group = None,
    layout: Layout = None,
) -> Tensor:
    """Clip each unit's gradient by the norm of its own weights over all ranks, in place.

    Where ``norm(g) > clip_factor * max(norm(w), eps)`` the unit is scaled down to that; units and
    an example are at ``AdaptiveGradClipper``.

    Args:
        parameters: As for ``AdaptiveGradClipper``.
        clip_factor: Lambda in the paper.
        eps: What a weight norm counts at least.
        group: As in ``clip_grad_norm_``.
        layout: As in ``clip_grad_norm_``.

    Returns:
        The total norm before clipping, as ``clip_grad_norm_``.

    Raises:
        ValueError, TypeError, ReplicaMismatchError: As ``AdaptiveGradClipper`` and its ``clip_``.

    Communication:
        A few all-gathers, in which the ranks agree on names and units, and one or two all-reduces:
        the second where units are split. In a training loop build an ``AdaptiveGradClipper`` once.

    References:
        Brock et al., 2021, arXiv:2102.06171.
    """
    clipper = AdaptiveGradClipper(parameters, clip_factor, eps, group=group, layout=layout)
    return clipper.clip_()


@dataclass(frozen=True)
class _Rows:
    """Which of a tensor's units this rank's piece belongs to.

    Attributes:
        block: Coordinates on the mesh axes that cut the first dim: ranks of one block hold pieces
            of the same rows, in the same order.
        count: How many rows those are.
        split: Some axis cuts through them.
    """

    block: tuple[int, ...]
    count: int
    split: bool


class _Clipper(GradClipper):
    """Measures as a GradClipper does, and scales unit by unit."""

    def __init__(
        self, parameters: Parameters, clip_factor: float, eps: float, **where: Any
    ) -> None:
        self._clip_factor = norm.check_max_norm(clip_factor, "clip_factor")
        self._eps = norm.check_max_norm(eps, "eps")
        super().__init__(parameters, None, norms="parameter", grad=_read, **where)
        self._alike = {"clip_factor": clip_factor, "eps": eps}
        self._starts: dict[int, int] = {}  # by key, the first lane of this rank's split rows
        self._counted: set[int] = set()  # keys whose piece this rank counts, of all that hold it
        self._lanes = self._agree(where["layout"])

    def _agree(self, layout: Layout) -> int:
        """Give every split unit of any rank a lane; return how many there are."""
        problems = []
        mine: dict[int, _Rows] = {}
        planner = self._collector._planner
        for source, key in zip(self._collector.sources, self._agreed.key_of, strict=True):
            try:
                owned = planner.settle_one(source, source.parameter).owned
                if owned is not None:
                    mine[key] = _rows(source, layout)
                    if owned.holders[0] == self._world.rank:
                        self._counted.add(key)
            except Exception as error:  # noqa: PERF203 - all ranks raise together, below
                problems.append(problem(source.name, error))
        told = reduce.gather((self._world.rank, problems, mine), self._world)
        verdict.raise_told([(rank, wrong) for rank, wrong, _ in told])
        blocks: dict[int, dict[tuple[int, ...], int]] = defaultdict(dict)
        for _, _, rows in told:
            for key, one in rows.items():
                if one.split:
                    blocks[key][one.block] = one.count
        lanes = 0
        for key in sorted(blocks):
            places = sorted(blocks[key])
            starts = accumulate((blocks[key][place] for place in places), initial=lanes)
            start = dict(zip(places, starts, strict=False))
            if key in mine:
                self._starts[key] = start[mine[key].block]
            lanes += sum(blocks[key].values())
        return lanes

    def _scale(self, judged: Judged, apart: frozenset[int] = frozenset()) -> None:
        """Multiply each unit by its own coefficient."""
        measured = judged.measured
        buckets, seats = measured.plan.buckets, measured.plan.seats
        grads = {
            buckets[seat.bucket].key or 0: tensor
            for seat, tensor in zip(seats, measured.local, strict=True)
        }
        # Weights count on every rank that holds them, with a gradient or without.
        sources = zip(self._collector.sources, self._agreed.key_of, strict=True)
        weights = {
            key: _norms(compat.local_tensor(source.parameter).detach())
            for source, key in sources
            if key in grads or key in self._starts
        }
        found = {key: _norms(grad) for key, grad in grads.items()}
        sums = self._summed((weights, found), measured.home)
        for key, grad in grads.items():
            own, norms = weights[key], found[key]
            start = self._starts.get(key)
            if start is not None:
                own, norms = sums[:, start : start + len(own)].sqrt().to(grad.device)
            limits = self._clip_factor * own.clamp(min=self._eps)
            coefs = torch.where(norms > limits, limits / norms, 1.0)
            if judged.stops is not None:
                coefs = torch.where(judged.stops.to(coefs.device), 1.0, coefs)
            if measured.read and bool((coefs == 1).all()):
                continue
            wide = grad.dtype in (torch.float64, torch.complex128)
            shape = (-1, *(1 for _ in grad.shape[1:])) if grad.dim() > 1 else ()
            grad.mul_((coefs if wide else coefs.float()).reshape(shape))

    def _summed(self, norms: Sequence[Mapping[int, Tensor]], device: torch.device) -> Tensor:
        """Add up the squares of all ranks' pieces of split units: weights', then gradients'."""
        sums = torch.zeros(2, self._lanes, dtype=torch.float64, device=device)
        for row, held in enumerate(norms):
            for key in self._counted & self._starts.keys() & held.keys():
                lanes = slice(self._starts[key], self._starts[key] + len(held[key]))
                sums[row, lanes] = compat.to_device(held[key].square(), device)
        if self._lanes:  # the same number on every rank
            reduce.all_reduce(sums, self._world).wait()
        return sums


def _read(parameter: Tensor) -> Tensor | None:
    """Read a gradient whose units are those of its parameter."""
    grad = parameter.grad
    if grad is None:
        return None
    if not compat.is_strided(grad):
        raise ValueError("adaptive clipping of a sparse gradient is not supported; densify it")
    shapes = [tuple(compat.local_tensor(tensor).shape) for tensor in (parameter, grad)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"this rank's parameter has shape {shapes[0]} and its gradient {shapes[1]}; adaptive "
            "clipping needs both laid out alike"
        )
    return grad


def _rows(source: Source, layout: Layout) -> _Rows:
    """Find a piece's place among its tensor's units."""
    tensor = source.parameter
    if source.ownership is not None:
        raise ValueError(
            "FSDP1 cuts parameters through their rows, which adaptive clipping needs; use FSDP2 "
            "(torch.distributed.fsdp.fully_shard)"
        )
    count = compat.local_tensor(tensor).shape[0] if tensor.dim() > 1 else 1
    declared = layout(tensor) if callable(layout) else layout
    if declared is None or (compat.is_dtensor(tensor) and not callable(layout)):
        if not compat.is_dtensor(tensor):
            return _Rows((), count, False)
        mesh, placements = compat.mesh_and_placements(tensor)
    else:
        mesh, placements = dtensor.check_layout(declared)
    cut = [placement for placement in placements if not placement.is_replicate()]
    if tensor.dim() <= 1:
        return _Rows((), count, bool(cut))
    dims = [None if p.is_replicate() else p.dim % tensor.dim() for p in placements]
    block = tuple(c for c, dim in zip(mesh.get_coordinate(), dims, strict=True) if dim == 0)
    return _Rows(block, count, any(dim not in (None, 0) for dim in dims))


def _norms(tensor: Tensor) -> Tensor:
    """Return the norms of a piece's rows, float64."""
    real = compat.real_view(tensor)
    flat = real.flatten(1) if tensor.dim() > 1 else real.reshape(1, -1)
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    return norms
