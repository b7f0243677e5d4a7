"""Plans of earlier calls: the functions use them again for parameters like those of before.

A loop calls with the same parameters in every step. From the third call on nothing is planned, as
long as the same kind of gradients is there. Neither parameters nor gradients are held: a plan
depends on their kinds and names alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardclip import compat
from shardclip.layout import Source

from .plan import Plan

_MOST = 4  # sets of parameters; a plan keeps small tables on its device
_threads = threading.local()  # a plan's tables are written in every step


@dataclass(frozen=True)
class _Kept:
    """What was seen in an earlier call.

    Attributes:
        kinds: All that the plan depends on: see ``_kinds``.
        plan: What was made for it; None where it was seen once: a call alone keeps nothing.
    """

    kinds: list[object]
    plan: Plan | None


def find(
    key: Hashable,
    sources: Sequence[Source],
    grads: Sequence[Tensor | None],
    make: Callable[[], Plan],
) -> Plan:
    """Return a plan for these sources, made anew where none was kept.

    Args:
        key: What else the plan depends on.
        sources: Where the gradients are found.
        grads: The gradients.
        make: Makes the plan.
    """
    try:
        kinds = _kinds(sources, grads)
    except Exception:  # of a strange tensor, on this rank alone: the plan says what is wrong
        kinds = None
    if kinds is None or compat.is_capturing():  # a graph may outlive what is kept
        return make()
    kept: OrderedDict[Hashable, _Kept] = vars(_threads).setdefault("kept", OrderedDict())
    where = key, len(sources), sources[0].name if sources else None
    found = kept.pop(where, None)
    again = found is not None and found.kinds == kinds
    if found is not None and again and found.plan is not None:
        kept[where] = found  # the latest
        return found.plan
    made = make()
    if not (made.problems or made.notices):
        kept[where] = _Kept(kinds, made.without_parameters() if again else None)
    if len(kept) > _MOST:
        kept.popitem(last=False)
    return made


def _kinds(sources: Sequence[Source], grads: Sequence[Tensor | None]) -> list[object] | None:
    """Tell the kinds of parameters and gradients, and their names; None where that is not all."""
    if any(source.span is not None or source.ownership is not None for source in sources):
        return None
    parameters = [source.parameter for source in sources]
    if not all(isinstance(parameter, Tensor) for parameter in parameters):
        return None
    if any(map(compat.is_fsdp1_flattened, parameters)):
        return None
    kinds = compat.signatures(parameters) + compat.signatures(grads)
    meshes = {id(kind.mesh): kind.mesh for kind in kinds if hasattr(kind, "mesh")}
    # To torch a slice may equal one of another mesh, and other ranks then hold copies.
    roots = [compat.root_mesh(mesh) for mesh in meshes.values()]
    return [*kinds, *roots, *(source.name for source in sources)]
