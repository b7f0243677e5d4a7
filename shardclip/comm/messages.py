"""What ranks tell each other, as bytes; what went wrong in packing it travels in its place."""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Failure:
    """Why a rank has nothing to tell."""

    rank: int
    text: str


def pack(value: Any, rank: int) -> bytes:
    """Pickle a value; where that fails on this rank, its error, which all ranks then raise."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        return pickle.dumps(_Failure(rank, f"{type(error).__name__}: {error}"))


def unpack(told: Iterable[tuple[int, bytes | memoryview]]) -> list[Any]:
    """Unpickle what ranks have told.

    Args:
        told: Ranks, and what ``pack`` returned there.

    Raises:
        RuntimeError: A rank could not pickle its value, which all ranks are told alike; or this
            rank cannot unpickle another's.
    """
    values = []
    for rank, packed in told:
        try:
            values.append(pickle.loads(packed))
        except Exception as error:  # noqa: PERF203 - whose it is belongs in the message
            raise RuntimeError(
                f"what rank {rank} has sent cannot be unpickled on this rank "
                f"({type(error).__name__}: {error}). Run the same versions of Python, torch and "
                "shardclip, and the same script, on all ranks"
            ) from error
    failures = [value for value in values if isinstance(value, _Failure)]
    if failures:
        lines = "; ".join(f"{failure.text} (rank {failure.rank})" for failure in failures[:4])
        raise RuntimeError(
            f"what ranks tell each other could not be pickled: {lines}. Nothing was changed; give "
            "names as strings, and thresholds of param groups as numbers"
        )
    return values
