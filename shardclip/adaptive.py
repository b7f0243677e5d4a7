"""Thresholds that follow the norm, as users import them."""

from .rules.adaptive import AutoClip, LinearWarmup, RunningMean, Threshold, ZClip

__all__ = ["AutoClip", "LinearWarmup", "RunningMean", "Threshold", "ZClip"]
