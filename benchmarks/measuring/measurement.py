"""What is found out about one contender in one case and kind of step."""

from dataclasses import dataclass, field

from benchmarks.counting import Counts


@dataclass
class Times:
    """Every timed call of a contender in a kind of step; the slowest rank's time of each.

    Attributes:
        seconds: Of the calls.
        cpu_seconds: The calling thread's own time in them: it does not wait for other ranks.
        hidden: What it left to the backward pass, in seconds.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Counted:
    """What a call does.

    Attributes:
        counts: Largest over the ranks.
        building: Collectives for what is built before the first call.
        reading: Collectives more for reading the norm that the call returned.
        host_syncs: Values that the host reads where reading is not free, as on a device; None where
            that path cannot be taken on CPU, and in steps that are not the usual one.
        norm_error: Of the norm, relative to the float64 norm of the whole.
    """

    counts: Counts = field(default_factory=Counts)
    building: int = 0
    reading: int = 0
    host_syncs: int | None = None
    norm_error: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """One contender in one case and kind of step: ``Counted`` and ``Times`` with their names.

    Attributes:
        case: Name of the case.
        step: One of `clipping.STEPS`.
        contender: Name of the contender.
        does: What it does; ratios are to a baseline that does the same.
        bytes: Of a rank's gradients, largest over the ranks.
    """

    case: str
    step: str
    contender: str
    does: str
    bytes: int
    counts: Counts
    building: int
    reading: int
    host_syncs: int | None
    norm_error: float
    seconds: list[float]
    cpu_seconds: list[float]
    hidden: list[float]
