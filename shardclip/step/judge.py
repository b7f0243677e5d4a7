"""What a step that nothing is wrong with leads to: coefficients, and whether it is skipped."""

import torch
from torch import Tensor

from shardclip.rules import thresholds

from . import inspection, verdict
from .measure import Measured
from .pending import Begun, Judged
from .settings import ClipSettings


def judge(
    measured: Measured, begun: Begun, settings: ClipSettings, failed: Tensor | None, steps: int
) -> Judged:
    """Work out the coefficients, on all ranks alike.

    Args:
        measured: The step's norms, with nothing wrong that this rank knows of.
        begun: How it began.
        settings: The clipper's.
        failed: 0-dim bool where only the device knows whether something is wrong: then the
            gradients stay as they are.
        steps: How many steps were before.

    Communication:
        None, but for the details of what is not finite, with ``nonfinite="skip"``.
    """
    applied = thresholds.apply(begun.limits, measured.group_norms, measured.total_norm, steps)
    coefs = applied.coefs
    if failed is not None:
        coefs = torch.where(failed, 1.0, coefs)
    unit = begun.found.unit
    factors = coefs if unit is None else coefs * unit.to(coefs.device)
    names = nonfinite_names(measured)
    stops = _stops(measured, begun, settings, applied.spiked)
    if stops is None:
        return Judged(measured, coefs, factors, failed, False, names, applied.limits)
    if failed is not None:
        stops = stops | failed
    coefs, factors = torch.where(stops, 1.0, coefs), torch.where(stops, 1.0, factors)
    skipped = bool(stops) if measured.read else stops
    if names is not None and settings.nonfinite == "skip" and failed is None:
        measured.nonfinite = inspection.nonfinite(measured, begun.world)
    return Judged(measured, coefs, factors, stops, skipped, names, applied.limits)


def nonfinite_names(measured: Measured) -> list[str] | None:
    """Name what is not finite while the gradients still have it, where looking is free."""
    if not measured.read or measured.finite:
        return None
    return verdict.nonfinite_names(measured)


def _stops(
    measured: Measured, begun: Begun, settings: ClipSettings, spiked: Tensor | None
) -> Tensor | None:
    """Tell whether the optimizer's step is to be left out; None where it never is."""
    if begun.scaler is None and settings.nonfinite != "skip":
        return spiked
    nonfinite = ~torch.isfinite(measured.total_norm)
    return nonfinite if spiked is None else spiked | nonfinite
