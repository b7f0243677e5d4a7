"""Who is compared in a case, and who is left out of it."""

from benchmarks.cases import Case

from .baselines import BASELINES
from .clipping import Contender
from .ours import OURS

CONTENDERS = (*BASELINES, *OURS)
"""In the order of the tables; ratios are to the first that is present and does the same."""


def present(case: Case) -> tuple[list[Contender], dict[str, str]]:
    """Choose the contenders of a case; say of the others that fit why they are left out."""
    fitting = [contender for contender in CONTENDERS if contender.fits(case)]
    reasons = {contender.name: contender.lacking() for contender in fitting}
    absent = {name: reason for name, reason in reasons.items() if reason is not None}
    return [contender for contender in fitting if contender.name not in absent], absent
