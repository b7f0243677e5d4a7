"""Looking at all ranks from inside one: values, and errors that must be alike."""

import re

import torch.distributed as dist


def everywhere(value: object) -> list:
    """This value on every rank, by rank."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same_everywhere(value: object) -> bool:
    """Whether every rank has the same value (compared as Python objects)."""
    values = everywhere(value)
    return all(other == values[0] for other in values)


def raised_everywhere(call, kind: type[Exception] | tuple, *patterns: str) -> str:
    """Check that the call raises the same error on every rank; the message.

    The patterns are looked for one by one, in any case.
    """
    try:
        call()
    except Exception as error:
        outcome = (type(error).__name__, str(error))
        of_kind = isinstance(error, kind)
        shown = error
    else:
        outcome, of_kind, shown = ("nothing raised", ""), False, None
    outcomes = everywhere(outcome)
    if not of_kind:
        raise AssertionError(f"{kind} expected; by rank: {outcomes}") from shown
    assert all(other == outcome for other in outcomes), f"ranks differ: {outcomes}"
    for pattern in patterns:
        assert re.search(pattern, outcome[1], re.IGNORECASE), f"{pattern!r} not in: {outcome[1]}"
    return outcome[1]
