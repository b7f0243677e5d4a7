"""Slurm's compressed lists, read without `scontrol`, which a container does not have."""

import re
from itertools import product

from .errors import LaunchError

_MAX_HOSTS = 100_000
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(hostlist: str) -> list[str]:
    """Expand a Slurm host list: `a[1-2]b[08,10]` gives a1b08, a1b10, a2b08, a2b10.

    Args:
        hostlist: names separated by commas, with any number of bracketed ranges each.

    Returns:
        The hosts in Slurm's order; zero padding is kept.

    Raises:
        LaunchError: the list is empty or not well-formed; the message shows it.
    """
    hosts: list[str] = []
    for term in _split(hostlist.strip(), hostlist):
        pieces = re.split(r"\[([^\]]*)\]", term)
        # odd pieces stood in brackets
        choices = [_ranges(piece, hostlist) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        hosts += ["".join(parts) for parts in product(*choices)]
        if len(hosts) > _MAX_HOSTS:
            raise LaunchError(f"host list {hostlist[:60]!r} names more than {_MAX_HOSTS} hosts")
    if not hosts:
        raise LaunchError(
            "the host list is empty: SLURM_JOB_NODELIST is set to nothing; "
            "start this inside an allocation (salloc, sbatch)"
        )
    return hosts


def _split(text: str, whole: str) -> list[str]:
    """Split at the commas that stand outside of brackets."""
    terms, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in {0, 1}:
            raise LaunchError(f"host list {whole!r}: brackets do not match at character {i}")
        if char == "," and depth == 0:
            terms.append(text[start:i])
            start = i + 1
    if depth:
        raise LaunchError(f"host list {whole!r}: a bracket is not closed")
    terms.append(text[start:])
    if text and not all(term.strip() for term in terms):
        raise LaunchError(f"host list {whole!r}: an empty name between commas")
    return [term.strip() for term in terms if term.strip()]


def _ranges(text: str, whole: str) -> list[str]:
    """Expand what stands in brackets: `08-10,12`."""
    names: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise LaunchError(f"host list {whole!r}: {part!r} is not a number or a range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise LaunchError(f"host list {whole!r}: the range {part!r} runs backwards")
        if int(last) - int(first) >= _MAX_HOSTS:
            raise LaunchError(f"host list {whole!r}: the range {part!r} is too long")
        names += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return names


def expand_counts(counts: str) -> list[int]:
    """Expand Slurm's counts a host: `2(x3),1` gives [2, 2, 2, 1].

    Raises:
        LaunchError: the text is not of that form; the message shows it.
    """
    result: list[int] = []
    for part in counts.split(","):
        match = _TASKS.fullmatch(part.strip())
        if not match:
            raise LaunchError(f"SLURM_TASKS_PER_NODE={counts!r}: {part!r} is not like 2 or 2(x3)")
        result += [int(match[1])] * int(match[2] or 1)
    return result
