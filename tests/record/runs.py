"""Runs as they would be recorded: outcomes, with norms by module where asked for."""

import math
import random

from shardclip.record.logging import JsonLines
from shardclip.record.outcome import Outcome, combine

MODULES = ("embed", *(f"layers.{n}.{part}" for n in range(4) for part in ("attn", "mlp")), "head")


def outcome(step=1, norm=3.0, max_norm=1.0, **more) -> Outcome:
    """One group, clipped as GradClipper does."""
    coef = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else math.nan
    if more.get("skipped"):
        coef = 1.0
    more.setdefault("time", 1767225600.0 + step)
    return Outcome(norm, (norm,), (coef,), (max_norm,), step=step, **more)


def steps(count=200, spikes=(), nonfinite=(), max_norm=1.0, level=0.6, seed=0):
    """Norms around ``level``; a spike is ``layers.2.mlp`` times 100; warm-up ends after 20."""
    chance = random.Random(seed)
    out = []
    for step in range(1, count + 1):
        size = level * (1 + 9 * math.exp(-step / 6)) / math.sqrt(len(MODULES))
        norms = {name: size * math.exp(chance.gauss(0, 0.1)) for name in MODULES}
        if step in spikes:
            norms["layers.2.mlp"] *= 100
        if step in nonfinite:
            norms["layers.1.attn"] = math.nan
        total = math.nan if step in nonfinite else combine(list(norms.values()), 2.0)
        out.append(outcome(step, total, max_norm, norms=norms, skipped=step in nonfinite))
    return out


def written(path, recorded, **options):
    """The file that JsonLines makes of them."""
    log = JsonLines(path, **options)
    for step in recorded:
        log.write(step)
    log.close()
    return path
