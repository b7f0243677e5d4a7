"""What is known of a failed rank: recorded by its guard, printed last by the launcher."""

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_FIRST_LINE = "Traceback (most recent call last):"
# torch puts this before each line of an exception that nobody caught
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


@dataclass(frozen=True)
class Failure:
    """A rank that failed."""

    host: str
    rank: int
    code: int
    """What the run exits with: the rank's own code, or 128 + n for signal n."""
    reason: str
    """`exited with code 7`, `was killed by SIGKILL`."""
    traceback: str = ""
    """The last traceback that it printed, or its last lines."""
    log: str = ""
    """The file with all it printed."""
    attempt: int = 0
    """The restart in which it failed."""

    def dumps(self) -> str:
        """Write as one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str | bytes) -> "Failure":
        """Read what `dumps` wrote."""
        return Failure(**json.loads(text))

    def report(self) -> str:
        """Write for a reader; this is what stands last on the screen."""
        lines = [f"first failure: rank {self.rank} on {self.host} {self.reason}"]
        if self.traceback:
            lines += ["  " + line for line in self.traceback.splitlines()]
        if self.log:
            lines.append(f"its log: {self.log} (on {self.host})")
        return "\n".join(lines)


def exit_code(returncode: int) -> int:
    """Return 128 + n where a process ended by signal n, else its exit code."""
    return 128 - returncode if returncode < 0 else returncode


def reason(returncode: int) -> str:
    """Say how a process ended."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def last_traceback(lines: Sequence[str], most: int = 60) -> str:
    """Pick the last traceback from what a rank printed, with those it was chained to.

    Args:
        lines: the last lines of its standard error.
        most: return at most so many lines, the last ones.

    Returns:
        The traceback; where there is none, the last ten lines.
    """
    lines = [_RANK_PREFIX.sub("", line) for line in lines]
    starts = [i for i, line in enumerate(lines) if line.rstrip() == _FIRST_LINE]
    if not starts:
        return "\n".join(line.rstrip() for line in lines[-10:]).strip()
    first = starts[-1]
    for start in reversed(starts[:-1]):
        between = lines[start:first]
        if any(line.startswith(_CHAINED) for line in between[-4:]):
            first = start
        else:
            break
    end = len(lines)
    for i in range(starts[-1] + 1, len(lines)):
        line = lines[i]
        # the message, the first line at the margin, ends the traceback
        if line.strip() and not line[0].isspace():
            end = i + 1
            break
    # a message of several lines goes on until the log changes its subject; keep a few
    end = min(len(lines), max(end, min(len(lines), end + 5)))
    return "\n".join(line.rstrip() for line in lines[first:end][-most:]).strip()
