"""What a step is clipped by: each param group's threshold, a number or by a common rule."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardclip import compat
from shardclip.math import norm

Rule = Callable[[Tensor, int], Tensor | float]
"""From the total norm (float64, 0-dim) and the number of steps before this one to a threshold."""

Limit = float | Rule | None


@dataclass(frozen=True)
class Applied:
    """A step's thresholds and what follows from them.

    Attributes:
        limits: Each group's threshold, inf without one; a float64 tensor where a rule gave any.
        coefs: float64, each group's coefficient; of groups that are left alone, 1.
        spiked: 0-dim bool: a rule with ``skip`` leaves this step out; None where none does.
    """

    limits: Sequence[float] | Tensor
    coefs: Tensor
    spiked: Tensor | None = None


def of_groups(groups: Sequence[Mapping[str, Any]], default: Limit) -> list[Limit]:
    """Return each group's threshold as it is now; those without one of their own share a rule.

    Raises:
        ValueError: One is negative or NaN, or a group has a rule of its own.
    """
    shared = default if callable(default) else None
    own = [group.get("max_norm", default) for group in groups]
    return [
        limit if limit is None or limit is shared else norm.check_max_norm(limit) for limit in own
    ]


def rule_of(limits: Sequence[Limit]) -> Rule | None:
    """Return the rule that some group follows, if any does."""
    return next((limit for limit in limits if callable(limit)), None)


def skips(rule: Rule | None) -> bool:
    """Whether a rule leaves a step out rather than clip it."""
    return bool(getattr(rule, "skip", False))


def named(limits: Sequence[object]) -> list[object]:
    """Put rules into words that are the same in every process; numbers stay as they are."""
    return [
        re.sub(r" at 0x[0-9a-fA-F]+", "", repr(limit)) if callable(limit) else limit
        for limit in limits
    ]


def apply(limits: Sequence[Limit], norms: Tensor, total_norm: Tensor, step: int) -> Applied:
    """Work out each group's coefficient: by its own norm, or where a rule is followed by the total.

    Args:
        limits: Of ``of_groups``.
        norms: float64, the groups' norms.
        total_norm: float64, 0-dim, on the same device.
        step: How many steps were clipped before.

    Raises:
        ValueError: The rule returned a wrong number for a finite norm, or several numbers.
    """
    rule = rule_of(limits)
    given = tuple(math.inf if limit is None or callable(limit) else limit for limit in limits)
    bounds = compat.constant(given, torch.float64, norms.device)
    told: Sequence[float] | Tensor = given
    spiked = None
    if rule is not None:
        threshold = _evaluate(rule, total_norm, step)
        follows = compat.constant(tuple(map(callable, limits)), torch.bool, norms.device)
        told = bounds = torch.where(follows, threshold, bounds)
        norms = torch.where(follows, total_norm, norms)
        spiked = torch.isfinite(total_norm) & (total_norm > threshold) if skips(rule) else None
    coefs = norm.clip_coef(norms, bounds)
    if None in limits:
        alone = tuple(limit is None for limit in limits)
        coefs = torch.where(compat.constant(alone, torch.bool, norms.device), 1.0, coefs)
    return Applied(told, coefs, spiked)


def _evaluate(rule: Rule, total_norm: Tensor, step: int) -> Tensor:
    """Call a rule and return its threshold as a tensor like the norm."""
    limit = rule(total_norm, step)
    (name,) = named([rule])
    if not isinstance(limit, Tensor):
        wrong = isinstance(limit, float) and math.isnan(limit)
        if not (wrong and not math.isfinite(float(total_norm))):  # a rule may compute with it
            norm.check_max_norm(limit, f"max_norm: what {name} returned")
        return torch.full_like(total_norm, float(limit))
    if limit.numel() != 1:
        raise ValueError(
            f"max_norm: {name} returned a tensor of shape {tuple(limit.shape)}; return one number"
        )
    limit = compat.to_device(limit.detach().double().reshape(()), total_norm.device)
    return torch.where(limit >= 0, limit, math.nan)  # not looked at on the host
