"""Pure math of the p-norm: how power sums combine, how one finishes, what coefficient follows."""

import math

import torch
from torch import Tensor

# torch.nn.utils.clip_grad_norm_ adds this to the norm before it divides.
EPSILON = 1e-6


def check_norm_type(norm_type: float | str) -> float:
    """Return ``norm_type`` as a float: 0, any p > 0, or inf.

    Raises:
        ValueError: It is NaN, negative or not a number.
    """
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        raise ValueError(
            f"norm_type must be a number >= 0 or inf, got {norm_type!r}; the usual one is 2.0"
        ) from None
    if math.isnan(p) or p < 0:
        raise ValueError(f"norm_type must be >= 0 or inf, got {norm_type!r}; the usual one is 2.0")
    return p


def check_max_norm(max_norm: float, what: str = "max_norm") -> float:
    """Return ``max_norm`` as a float.

    Raises:
        ValueError: It is negative or NaN: the first would turn every gradient around.
    """
    try:
        value = float(max_norm)
    except (TypeError, ValueError):
        raise ValueError(f"{what} must be a number >= 0, got {max_norm!r}") from None
    if math.isnan(value) or value < 0:
        raise ValueError(f"{what} must be >= 0, got {value}; use inf to measure without clipping")
    return value


def is_maximum(p: float) -> bool:
    """Whether partial results combine by maximum (p = inf) rather than by sum."""
    return math.isinf(p)


def finish(power_sum: Tensor, p: float) -> Tensor:
    """Turn the sum of |x|^p (the maximum for p = inf, the count for p = 0) into the norm."""
    if p == 2:
        return power_sum.sqrt()
    if p in (0, 1) or is_maximum(p):
        return power_sum
    return power_sum.pow(1 / p)


def clip_coef(total_norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """``min(1, max_norm / (total_norm + 1e-6))``, NaN where the norm is; as torch has it."""
    return (max_norm / (total_norm + EPSILON)).clamp(max=1.0)


def tf_clip_coef(total_norm: Tensor, clip_norm: float) -> Tensor:
    """``clip_norm / max(total_norm, clip_norm)``, NaN where the norm is not finite.

    The formula of ``tf.clip_by_global_norm``, with 1 in place of 0/0 and of inf/inf.
    """
    coef = torch.where(total_norm > clip_norm, clip_norm / total_norm, 1.0)
    return torch.where(torch.isfinite(total_norm), coef, torch.nan)
