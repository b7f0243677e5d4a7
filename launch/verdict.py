"""Judges what the ranks of a preflight saw; pure data in, findings out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_NORM_TOLERANCE = 1e-5
_CLOCK_TOLERANCE = 1.0

Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str
    ok: bool
    text: str
    """What was seen; where not ok, what to do."""
    at_fault: tuple[str, ...] = field(default=())
    """The hosts that are at fault."""


def judge(ranks: Sequence[Facts]) -> list[Finding]:
    """Return the findings of a preflight, in the order of its checks.

    Args:
        ranks: every rank's facts, in rank order.
    """
    return [
        _versions(ranks),
        _devices(ranks),
        _clocks(ranks),
        _head(ranks),
        _all_reduce(ranks),
        _gradient_norm(ranks),
    ]


def _hosts(ranks: Sequence[Facts]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(facts["host"] for facts in ranks))


def _versions(ranks: Sequence[Facts]) -> Finding:
    common, odd, texts = {}, [], []
    for name in ranks[0]["versions"]:
        counts = Counter(facts["versions"][name] for facts in ranks)
        common[name] = counts.most_common(1)[0][0]
        for facts in ranks:
            if facts["versions"][name] != common[name]:
                odd.append(facts)
                texts.append(f"{facts['host']} has {name} {facts['versions'][name]}")
    if odd:
        seen = "; ".join(dict.fromkeys(texts))
        others = ", ".join(f"{name} {common[name]}" for name in common)
        return Finding("versions", False, f"{seen}; the others have {others}", _hosts(odd))
    return Finding("versions", True, ", ".join(f"{k} {v}" for k, v in common.items() if v != "-"))


def _devices(ranks: Sequence[Facts]) -> Finding:
    usual = Counter(facts["device"] for facts in ranks).most_common(1)[0][0]
    odd = [facts for facts in ranks if facts["device"] != usual]
    if odd:
        seen = "; ".join(dict.fromkeys(f"{f['host']} has {f['device']}" for f in odd))
        return Finding("devices", False, f"{seen}; the others have {usual}", _hosts(odd))
    crowded = [
        facts
        for facts in ranks
        if facts["devices_on_host"] and facts["local_rank"] >= facts["devices_on_host"]
    ]
    if crowded:
        return Finding(
            "devices", False, "more ranks than devices: two share one; lower --nproc-per-node",
            _hosts(crowded),
        )  # fmt: skip
    return Finding("devices", True, f"{len(ranks)} ranks, each with {usual}")


def _clocks(ranks: Sequence[Facts]) -> Finding:
    offsets = {facts["host"]: facts["clock"][0] for facts in ranks}
    widest = max(offsets, key=lambda host: abs(offsets[host]))
    text = f"largest offset {offsets[widest]:+.6f} s, of {widest} against {ranks[0]['host']}"
    ok = abs(offsets[widest]) <= _CLOCK_TOLERANCE
    if ok:
        return Finding("clocks", True, text)
    return Finding("clocks", False, f"{text}; start its time service", (widest,))


def _head(ranks: Sequence[Facts]) -> Finding:
    slowest = max(ranks, key=lambda facts: facts["head"]["seconds"])
    head = ranks[0]["head"]
    return Finding(
        "head address",
        True,
        f"{head['address']} port {head['port']} reached from {len(_hosts(ranks))} host(s), slowest "
        f"{1e3 * slowest['head']['seconds']:.1f} ms from {slowest['host']}",
    )


def _all_reduce(ranks: Sequence[Facts]) -> Finding:
    wrong = [facts for facts in ranks if not facts["all_reduce"]["right"]]
    if wrong:
        return Finding("all-reduce", False, "wrong sum", _hosts(wrong))
    latency = max(facts["all_reduce"]["latency_seconds"] for facts in ranks)
    bandwidth = min(facts["all_reduce"]["bandwidth_bytes_per_second"] for facts in ranks)
    size = ranks[0]["all_reduce"]["bytes"] >> 20
    return Finding(
        "all-reduce",
        True,
        f"sum right; 4 bytes in {1e6 * latency:.0f} us, {size} MiB at {bandwidth / 1e9:.2f} GB/s",
    )


def _gradient_norm(ranks: Sequence[Facts]) -> Finding:
    failed = [facts for facts in ranks if "error" in facts["gradient_norm"]]
    if failed:
        error = failed[0]["gradient_norm"]["error"]
        return Finding("gradient norm", False, f"shardclip could not run: {error}", _hosts(failed))
    reference = ranks[0]["gradient_norm"]["reference"]
    # a NaN is far from everything
    wrong = [
        facts
        for facts in ranks
        if not abs(facts["gradient_norm"]["norm"] - reference) <= _NORM_TOLERANCE * reference
    ]
    if wrong:
        norm = wrong[0]["gradient_norm"]["norm"]
        text = f"sharded {norm:.7g}, single process {reference:.7g}"
        return Finding("gradient norm", False, text, _hosts(wrong))
    return Finding("gradient norm", True, f"sharded equals single process: {reference:.7g}")
