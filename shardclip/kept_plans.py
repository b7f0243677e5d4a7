"""Plans of earlier calls: the functions use them again for the same parameters.

A loop calls with the same parameters in every step. From the third call on nothing is planned,
as long as gradients of the same kind are there. No parameter is kept alive.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from . import compat
from .gradients import Source
from .plan import Plan

_MOST = 8  # sets of parameters


@dataclass(frozen=True)
class _Kept:
    """What was seen in an earlier call.

    Attributes:
        parameters: The sources' parameters and names, in order.
        signature: What the plan depends on in their gradients.
        plan: What was made for them; None where they were seen once: one call alone pays nothing.
    """

    parameters: list[tuple[weakref.ref[Tensor], str]]
    signature: list[object]
    plan: Plan | None

    def is_of(self, sources: Sequence[Source], signature: list[object]) -> bool:
        """Whether these are the same parameters, with gradients of the same kind."""
        return (
            len(sources) == len(self.parameters)
            and signature == self.signature
            and all(
                seen() is source.parameter and name == source.name
                for (seen, name), source in zip(self.parameters, sources, strict=True)
            )
        )


def _is_simple(source: Source) -> bool:
    """Whether what is known of it lies in the parameter and its gradient alone."""
    return source.span is None and source.ownership is None and isinstance(source.parameter, Tensor)


_kept: OrderedDict[Hashable, _Kept] = OrderedDict()


def find(
    key: Hashable,
    sources: Sequence[Source],
    grads: Sequence[Tensor | None],
    make: Callable[[], Plan],
) -> Plan:
    """Return a plan for these sources, made anew where none was kept.

    Args:
        key: What else the plan depends on.
        sources: Parameters, each with a gradient of its own.
        grads: Their gradients.
        make: Makes the plan.
    """
    if not all(_is_simple(source) for source in sources):
        return make()
    where = key, len(sources), id(sources[0].parameter) if sources else None
    signature = compat.signatures(grads)
    kept = _kept.get(where)
    again = kept is not None and kept.is_of(sources, signature)
    if kept is not None and again and kept.plan is not None:
        _kept.move_to_end(where)
        return kept.plan
    made = make()
    if not made.problems and not made.notices:
        seen = [(weakref.ref(source.parameter), source.name) for source in sources]
        _kept[where] = _Kept(seen, signature, made.without_parameters() if again else None)
        while len(_kept) > _MOST:
            _kept.popitem(last=False)
    return made
