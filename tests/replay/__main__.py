"""Compare the working tree with a revision: python -m tests.replay REVISION [PYTEST ARGUMENTS]."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("tests/dist", "tests/adapters")
SHOWN = 20


def record(tree: Path, folder: Path, arguments: list[str]) -> None:
    """Run a tree's own tests on ranks that write down what they send."""
    folder.mkdir()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tree), str(Path(__file__).parent)]),
        "SHARDCLIP_RANKS_PRELOAD": "recorder",
        "SHARDCLIP_REPLAY": str(folder),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *(arguments or TIERS)]
    if subprocess.run(command, cwd=tree, env=environment, check=False).returncode not in (0, 1):
        sys.exit(f"the tests of {tree} did not run")


def read(folder: Path) -> dict[str, dict[str, object]]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def unlike(old: dict[str, object], new: dict[str, object]) -> list[str]:
    """Name what differs in one all-reduce. A gradient that was gone in time is like any other."""
    pairs = zip(old.get("gradients", []), new.get("gradients", []), strict=False)
    gradients = any(a != b for a, b in pairs if a is not None and b is not None)
    return [key for key in old if key != "gradients" and old[key] != new.get(key)] + (
        ["gradients"] if gradients else []
    )


def differences(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    """A line for each rank's call that is not the same any more."""
    lines = []
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name]["lines"], after[name]["lines"]
        found = [unlike(a, b) for a, b in zip(old, new, strict=False)]
        found += [["one more, or one less"]] if len(old) != len(new) else []
        step = next((i for i, what in enumerate(found) if what), None)
        if step is not None:
            call = before[name]["call"][:100]
            lines.append(f"{call}: all-reduce {step}: {', '.join(found[step])}")
    return lines


def main(revision: str, *arguments: str) -> int:
    with tempfile.TemporaryDirectory(prefix="replay") as temporary:
        base = Path(temporary, "base")
        subprocess.run(["git", "worktree", "add", "--detach", base, revision], cwd=ROOT, check=True)
        try:
            for name, tree in (("before", base), ("after", ROOT)):
                print(f"{name}: {tree}", flush=True)
                record(tree, Path(temporary, name), list(arguments))
            before, after = (read(Path(temporary, name)) for name in ("before", "after"))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], cwd=ROOT, check=True)
    changed, both = differences(before, after), before.keys() & after.keys()
    for line in changed[:SHOWN]:
        print(line)
    steps = sum(len(before[name]["lines"]) for name in both)
    print(
        f"{len(both)} ranks' calls with {steps} all-reduces compared, {len(changed)} differ; "
        f"{len(before) - len(both)} are gone, {len(after) - len(both)} are new"
    )
    return 1 if changed or not both else 0


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
