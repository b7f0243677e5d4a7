"""What this library is to reach on two CPU cores, beside what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contenders import CLIPPED, FIRST, USUAL
from benchmarks.records import Row


@dataclass(frozen=True)
class Target:
    """A ratio to what a user of torch would call, in one run on the same gradients."""

    case: str
    step: str
    ratio: float
    contender: str = "GradClipper.clip_"


TARGETS = (
    Target("fsdp2/layers", USUAL, 0.35),
    Target("fsdp2/layers", CLIPPED, 0.7),
    Target("hsdp/layers", USUAL, 0.3),
    Target("fsdp2/small", USUAL, 0.12),
    Target("fsdp2/small", FIRST, 0.01),
    Target("plain/one-64Mi/fp16", USUAL, 0.4),
    Target("plain/one-64Mi", USUAL, 0.5),
    Target("plain/one-64Mi/bf16", USUAL, 0.65),
    Target("fsdp2/layers", CLIPPED, 0.75, "GradClipper.step(AdamW)"),
)
"""The first call is that of the function, which a user may call without building anything, or of
building a GradClipper and its first step: the better of the two."""

_FIRST = ("shardclip.clip_grad_norm_", "GradClipper.clip_")


def table(made: Sequence[Row]) -> str:
    """Set the ratios asked beside the ratios measured; those not measured are left blank.

    The second ratio is of the calling threads' own CPU time, which does not wait for other ranks
    or for a busy machine.
    """
    lines = [
        f"{'':<50}{'ratio to torch':^20}{'CPU time':>10}",
        f"{'case':<20} {'step':<8}{'what':<24}{'at most':>7}{'measured':>10}{'ratio':>10}",
        "-" * 80,
    ]
    for target in TARGETS:
        found = measured(target, made)
        asked = f"{target.case:<20} {target.step:<8}{target.contender:<24}{target.ratio:>7.2f}"
        if found is None:
            lines.append(f"{asked}{'-':>10}")
            continue
        mark = " " if found["ratio"][1] <= target.ratio else "*"
        asked = asked.replace(f"{target.contender:<24}", f"{found['contender']:<24}"[:24])
        lines.append(f"{asked}{found['ratio'][1]:>9.3f}{mark}{found['cpu_ratio'][1]:>10.3f}")
    return "\n".join([*lines, "* above what is asked"])


def measured(target: Target, made: Sequence[Row]) -> Row | None:
    """Find a target's row."""
    names = _FIRST if target.step == FIRST else (target.contender,)
    found = [
        row
        for row in made
        if row["kind"] == "clip"
        and (row["case"], row["step"]) == (target.case, target.step)
        and row["contender"] in names
        and row["ratio"]
    ]
    return min(found, key=lambda row: float(row["ratio"][1]), default=None)
