"""A plan's numbers as tensors, worked out once and kept on the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardclip import compat, kernels
from shardclip.comm import Lanes
from shardclip.copies import Drift, Proof, samples
from shardclip.math import exact

from .seats import Bucket, Seat


@dataclass(frozen=True)
class Tables:
    """A plan's numbers as tensors.

    Attributes:
        kernel: Sums what this rank reads, bucket by bucket.
        source: For each power lane that is added to, the bucket it takes.
        target: That lane.
        weights: The buckets' factors.
        direct: The buckets' sums are the power lanes as they are.
        proof: For the tensors that other ranks hold copies of, if there are any.
        drift: For the same, bit for bit.
    """

    kernel: kernels.Kernel
    source: Tensor
    target: Tensor
    weights: Tensor
    direct: bool
    proof: Proof | None
    drift: Drift | None

    def powers(self, sums: Tensor, maximum: bool, lanes: Lanes) -> Tensor:
        """Spread the buckets' sums over the lanes of the powers, and their NaNs under a maximum."""
        if self.direct:
            return sums
        if lanes.window is not None:  # the counts of what is not finite have no weight
            rows = sums.new_zeros(lanes.powers.stop, lanes.window.lanes)
            digits = sums[:, :-2] * self.weights.long().unsqueeze(1)
            counted = torch.cat([digits, sums[:, -2:]], 1)[self.source]
            return exact.carry(rows.index_add_(0, self.target, counted))
        out = sums.new_zeros(lanes.nans.stop)
        if maximum:
            found = sums[self.source]
            held = found.nan_to_num(0.0, torch.inf)
            out[lanes.powers].scatter_reduce_(0, self.target, held, "amax")
            out[lanes.nans].scatter_reduce_(0, self.target, found.isnan().double(), "amax")
        else:
            out.index_add_(0, self.target, (sums * self.weights)[self.source])
        return out

    @staticmethod
    def of(
        seats: Sequence[Seat],
        buckets: Sequence[Bucket],
        lanes: Lanes,
        kernel: kernels.Kernel,
        held: Sequence[Tensor],
        device: torch.device,
    ) -> Tables:
        """Work them out.

        Args:
            seats: The plan's.
            buckets: The plan's.
            lanes: The payload's layout.
            kernel: Sums what this rank reads.
            held: The seats' tensors that other ranks hold copies of.
            device: The payload's.
        """
        rows = [(b, bucket.group) for b, bucket in enumerate(buckets)]
        rows += [
            (b, lanes.groups + bucket.key)
            for b, bucket in enumerate(buckets)
            if bucket.key is not None
        ]
        routes = compat.to_device(compat.on_host(rows, torch.int64), device)
        weights = compat.on_host([bucket.weight for bucket in buckets])
        sat = [seat for seat in seats if seat.copy is not None]
        copies = [seat.copy for seat in sat if seat.copy is not None]
        proof: Proof | None = None
        drift: Drift | None = None
        if held:
            extents = [
                samples.extent(t, t.shape if seat.source.begins is None else seat.source.begins[1])
                for t, seat in zip(held, sat, strict=True)
            ]
            proof = Proof(copies, extents, held[0].device)
            drift = Drift(copies, held[0].device) if lanes.drift else None
        whole = range(lanes.nans.stop)
        direct = rows == [(i, i) for i in whole] and all(b.weight == 1 for b in buckets)
        weights = compat.to_device(weights, device)
        return Tables(kernel, routes[:, 0], routes[:, 1], weights, direct, proof, drift)
