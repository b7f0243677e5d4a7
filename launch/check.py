"""`shardclip-launch check`: a preflight on the hosts and ranks that a run would take."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .errors import OK, HostLostError
from .options import RunOptions
from .run import run
from .verdict import Finding, judge

_FAULT = 1


def check(options: RunOptions, environ: Mapping[str, str], *, as_json: bool, timeout: float) -> int:
    """Run the preflight and print what it found; returns 0 if nothing is at fault.

    The host with rank 0 prints; every host returns a code.

    Args:
        options: hosts and ranks, as for a run.
        environ: usually `os.environ`.
        as_json: print one JSON object instead of a table.
        timeout: seconds to wait for hosts that do not answer.

    Raises:
        LaunchError: refused before anything was started.
    """
    with tempfile.TemporaryDirectory(prefix="shardclip-check-") as private:
        report = Path(private) / "facts.json"
        probe = replace(
            options,
            command=("shardclip.launch.probe", str(report)),
            module=True,
            tee="none",
            join_timeout=timeout,
            host_timeout=min(options.host_timeout, timeout),
            grace=5.0,
        )
        try:
            code = run(probe, environ)
        except HostLostError as error:
            if as_json:
                print(json.dumps({"ok": False, "error": str(error), "ranks": [], "checks": []}))
            raise
        if not report.exists():
            # either another host has rank 0, or the run has said what failed
            if code != OK and as_json:
                print(
                    json.dumps({"ok": False, "error": "a rank failed", "ranks": [], "checks": []})
                )
            return code
        ranks = json.loads(report.read_text())
    findings = judge(ranks)
    print(_as_json(ranks, findings) if as_json else table(ranks, findings))
    return code or _complain(findings)


def _as_json(ranks: Sequence[dict[str, Any]], findings: Sequence[Finding]) -> str:
    ok = all(finding.ok for finding in findings)
    return json.dumps({"ok": ok, "checks": [asdict(f) for f in findings], "ranks": ranks}, indent=2)


def table(ranks: Sequence[dict[str, Any]], findings: Sequence[Finding]) -> str:
    """Lay ranks and findings out for a reader, at most 80 columns wide where names allow it."""
    width = max(4, *(len(facts["host"]) for facts in ranks))
    lines = [f"{'rank':>5} {'host':<{width}} {'local':>5} {'cpus':>5} {'threads':>7}  device"]
    lines += [
        f"{facts['rank']:>5} {facts['host']:<{width}} {facts['local_rank']:>5} {facts['cpus']:>5} "
        f"{facts['threads']:>7}  {facts['device']}"
        for facts in ranks
    ]
    lines.append("")
    for finding in findings:
        text = f"{'ok' if finding.ok else 'FAULT':<6}{finding.check:<14}{finding.text}"
        lines += _wrapped(text, 79, 20)
    return "\n".join(lines)


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    lines = []
    while len(text) > width:
        cut = text.rfind(" ", indent + 1, width)
        if cut < 0:
            break
        lines.append(text[:cut])
        text = " " * indent + text[cut + 1 :]
    return [*lines, text]


def _complain(findings: Sequence[Finding]) -> int:
    faults = [finding for finding in findings if not finding.ok]
    for finding in faults:
        print(
            f"shardclip-launch check: {finding.check}: at fault: {', '.join(finding.at_fault)}",
            file=sys.stderr,
        )
    return _FAULT if faults else OK
