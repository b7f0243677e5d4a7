"""A threshold, from the norms that a run has had."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from shardclip.record import Run, RunFileError

QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
FEWEST = 20
"""Fewer steps than this say nothing of quantiles."""
SPREAD = 3.0
"""How many standard deviations of the log norm still pass as usual."""
_BLOCKS = 20


@dataclass(frozen=True)
class Suggestion:
    """What a run's norms say about a threshold.

    Attributes:
        what: What the threshold is for: "total norm" or a param group.
        steps: How many steps it rests on.
        warmup: How many finite steps at the beginning were left out.
        chosen: Whether the caller chose how many.
        nonfinite: How many steps were not finite, and are left out too.
        quantiles: By their share (1.0 is the maximum), the norm.
        above: For each of these norms, the share of steps that it would have clipped.
        recommended: The threshold, of two digits.
        would_clip: The share of steps that it would have clipped.
        usual: The median norm.
        spread: By what factor usual norms differ from the median: one standard deviation.
        drift: The last third's median over the first third's.
        was: The share of steps that the run itself clipped.
    """

    what: str
    steps: int
    warmup: int
    chosen: bool
    nonfinite: int
    quantiles: dict[float, float]
    above: dict[float, float]
    recommended: float
    would_clip: float
    usual: float
    spread: float
    drift: float
    was: float


def suggest(run: Run, warmup: int | None = None) -> list[Suggestion]:
    """Work out a threshold for each param group: the upper end of the usual norms.

    ``median(n) * exp(3 * s)``, where ``s`` is the standard deviation of ``log n``, estimated by
    1.4826 times the median distance from the median, so that spikes do not widen it. What is
    clipped then is what stands out. Norms of a training run spread by factors, hence the logarithm.

    Args:
        run: What was recorded.
        warmup: How many steps at the beginning to leave out; None: the leading twentieths of the
            run, seven at most, whose median is more than twice, or less than half, that of the
            rest.

    Returns:
        One for a run with one param group, else one for each.

    Raises:
        RunFileError: After the warm-up fewer than 20 finite steps are left.

    References:
        Pascanu et al., "On the difficulty of training recurrent neural networks", 2013 (a threshold
        from statistics of the norm); Rousseeuw and Croux, 1993 (the median distance).
    """
    groups = len(run.steps[0].group_norms)
    if groups == 1:
        return [_suggest("total norm", run, [step.total_norm for step in run.steps], 0, warmup)]
    run_of = [step for step in run.steps if len(step.group_norms) == groups]
    return [
        _suggest(f"group {g}", run, [step.group_norms[g] for step in run_of], g, warmup)
        for g in range(groups)
    ]


def _suggest(
    what: str, run: Run, all_norms: Sequence[float], group: int, warmup: int | None
) -> Suggestion:
    finite = [norm for norm in all_norms if math.isfinite(norm)]
    left_out = _warmup(finite) if warmup is None else warmup
    norms = finite[left_out:]
    if len(norms) < FEWEST:
        after = f" after a warm-up of {left_out}" if left_out else ""
        raise RunFileError(
            f"{run.name}: {_finite(len(norms))}{after}; quantiles need at least {FEWEST}: record a "
            f"longer run{', or give a shorter --warmup' if left_out else ''}"
        )
    ordered = sorted(norms)
    logs = [math.log(norm) for norm in norms if norm > 0]
    if not logs:
        raise RunFileError(f"{run.name}: every norm is 0; the gradients do not reach the clipper")
    centre = statistics.median(logs)
    sigma = 1.4826 * statistics.median(abs(log - centre) for log in logs)
    recommended = _rounded(math.exp(centre + SPREAD * sigma))
    quantiles = {share: ordered[math.ceil(share * len(ordered)) - 1] for share in QUANTILES}
    quantiles[1.0] = ordered[-1]
    third = max(1, len(norms) // 3)
    early, late = statistics.median(norms[:third]), statistics.median(norms[-third:])
    coefs = [step.group_coefs[group] for step in run.steps if len(step.group_coefs) > group]
    return Suggestion(
        what=what,
        steps=len(norms),
        warmup=left_out,
        chosen=warmup is not None,
        nonfinite=len(all_norms) - len(finite),
        quantiles=quantiles,
        above={share: _above(ordered, norm) for share, norm in quantiles.items()},
        recommended=recommended,
        would_clip=_above(ordered, recommended),
        usual=statistics.median(norms),
        spread=math.exp(sigma),
        drift=late / early if early > 0 else math.nan,
        was=sum(coef < 1 for coef in coefs) / len(coefs),
    )


def _warmup(norms: Sequence[float]) -> int:
    """Return how many leading norms are unlike the rest."""
    block = len(norms) // _BLOCKS
    if block < 2:
        return 0
    usual = statistics.median(norms[len(norms) * 7 // _BLOCKS :])
    for index in range(8):
        here = statistics.median(norms[index * block : (index + 1) * block])
        if usual / 2 <= here <= usual * 2:
            return index * block
    return 0  # a drift through the whole run, not a warm-up


def _above(ordered: Sequence[float], threshold: float) -> float:
    return 1 - bisect_right(ordered, threshold) / len(ordered)


def _rounded(value: float) -> float:
    """Round up to two digits: more would pretend to what the norms do not say."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit * (1 - 1e-9)) * unit:.2g}")


def text(run: Run, found: Suggestion) -> str:
    """Return what a person reads, in lines of at most 80 columns."""
    lines = [_first_line(run, found)]
    if found.warmup:
        why = "--warmup" if found.chosen else "unlike the rest; --warmup N chooses"
        lines.append(f"  left out: the first {found.warmup} steps, warm-up ({why})")
    if found.nonfinite:
        lines.append(f"  left out: {_steps(found.nonfinite)} with a NaN or infinite norm")
    lines += ["", "  norm quantile      norm   as max_norm it would have clipped"]
    for share, norm in found.quantiles.items():
        name = "maximum" if share == 1 else f"{100 * share:g} %"
        lines.append(f"  {name:>13}  {norm:>8.4g}   {percent(found.above[share])} of the steps")
    lines += ["", f"  recommended: max_norm={found.recommended:g}"]
    lines += [f"    {line}" for line in reasons(found)]
    return "\n".join(lines)


def _first_line(run: Run, found: Suggestion) -> str:
    said = f": {found.what}, {_steps(found.steps)}"
    name = run.name if len(run.name) + len(said) <= 79 else run.name[: 76 - len(said)] + "..."
    return name + said


def reasons(found: Suggestion) -> list[str]:
    """Say why this threshold, in lines of at most 76 columns."""
    lines = [
        f"Usual norms lie around {found.usual:.3g}, within a factor of {found.spread:.3g} (one",
        "standard deviation). Three of those above the median still pass;",
        f"what stands out further, {percent(found.would_clip)} of the steps, would be clipped.",
    ]
    if found.would_clip == 0:
        lines.append("No step stood out: with this threshold clipping is a guard and no more.")
    elif found.would_clip > 0.1:
        lines.append("That is much: the norms have a long tail, or wander. Look at the picture.")
    if found.was > 0.5:
        lines += [
            f"This run was itself clipped in {percent(found.was)} of its steps, most of the time:",
            "there the threshold sets the update's length. Try a higher one, and compare.",
        ]
    if not 2 / 3 <= found.drift <= 3 / 2:
        lines += [
            f"The norm drifts: in the last third it is {found.drift:.2g} times the first third's.",
            "A fixed threshold fits one of them; consider one that adapts.",
        ]
    return lines


def _finite(count: int) -> str:
    return "1 finite step" if count == 1 else f"{count} finite steps"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def percent(share: float) -> str:
    """Return a share as a percentage, to two digits."""
    return "0 %" if share == 0 else f"{100 * share:.2g} %" if share < 0.995 else "100 %"
