"""What a GradClipper collects in every step: gradients, their plan, and the caller's numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from shardclip import compat
from shardclip.comm import Lanes, World
from shardclip.errors import problem
from shardclip.layout import Planner, Read, Source, adapters, gradient
from shardclip.math import norm
from shardclip.plan import Plan, exactness, plan

from . import loss_scaling, uneven_inputs
from .agreement import Agreement
from .overlap import Overlap
from .strays import Strays


@dataclass(frozen=True)
class Collected:
    """One step's input.

    Attributes:
        grads: The sources' gradients.
        plan: Made for them.
        fresh: Whether it is new.
        added: The caller's numbers.
        unit: What the gradients are still to be multiplied by: a loss scale's inverse.
        notices: What to warn of once, and about what, when the step is through.
    """

    grads: list[Tensor | None]
    plan: Plan
    fresh: bool
    added: list[float | Tensor] = field(default_factory=list)
    unit: Tensor | None = None
    notices: list[tuple[object, str]] = field(default_factory=list)


class Collector:
    """Collects one rank's gradients; plans anew only where their set has changed."""

    def __init__(
        self,
        sources: Sequence[Source],
        planner: Planner,
        agreed: Agreement,
        lanes: Lanes,
        p: float,
        also: Sequence[str],
        read: Read | None,
        overlap: bool,
        strays: Strays,
    ) -> None:
        self.sources = sources
        self.overlap = Overlap(sources, p, planner.world) if overlap else None
        self._planner = planner
        self._agreed = agreed
        self._lanes = lanes
        self._p = p
        self._also = also
        self._read = adapters.read_grad if read is None else read
        self._strays = strays
        self._plan: Plan | None = None
        self._signature: list[object] = []
        self._alone: Collector | None = None
        # Where gradients are found without a question, no function is called for each.
        direct = read is None and all(source.span is None for source in sources)
        self._bare = [source.parameter for source in sources] if direct else []

    def collect(
        self,
        also: Mapping[str, float | Tensor] | None,
        scaler: GradScaler | None,
        stepped: Sequence[Optimizer],
    ) -> Collected:
        """Collect one step's input.

        Whatever goes wrong here on one rank is a problem of the plan: this rank still joins the
        all-reduce, and then all ranks raise.
        """
        try:
            added = self._added(also)
            grads = self._gradients()
            notices = self._strays.check(grads, stepped)
            unit = None if scaler is None else self._unit(scaler, stepped, grads)
            made, fresh = self._planned(grads)
            if self.overlap is not None:
                self.overlap.drop_outdated(grads)
        except Exception as error:  # a user's grad= may raise anything
            failed = Plan(self._lanes, problems=[problem("GradClipper.clip_", error)])
            return Collected([], failed, True)
        notices += made.notices if fresh else []
        return Collected(grads, made, fresh, added, unit, notices)

    def taking_part(self) -> tuple["Collector", World]:
        """Return what collects this step and the ranks that it is reduced over.

        Raises:
            ValueError: As ``uneven_inputs.taking_part``.
        """
        world = self._planner.world
        if not uneven_inputs.under_way(world):
            return self, world
        alone = uneven_inputs.taking_part(world, self.sources, self._gradients())
        if self._alone is None:  # plans of its own: it reads in full what others shared
            planner = Planner(alone, self._planner.layout)
            how = self._agreed, self._lanes, self._p, self._also, self._read
            self._alone = Collector(self.sources, planner, *how, False, self._strays)
        return self._alone, alone

    def group_of(self) -> dict[int, int]:
        """By ``id`` of the parameter, the group that its ``.grad`` belongs to as a whole."""
        if self._read is not adapters.read_grad:
            return {}
        groups: dict[int, set[int]] = {}
        for source in self.sources:
            groups.setdefault(id(source.parameter), set()).add(source.group)
        return {key: held.pop() for key, held in groups.items() if len(held) == 1}

    def _gradients(self) -> list[Tensor | None]:
        if self._bare:
            return [parameter.grad for parameter in self._bare]
        return [gradient(source, self._read) for source in self.sources]

    def _unit(
        self, scaler: GradScaler, stepped: Sequence[Optimizer], grads: Sequence[Tensor | None]
    ) -> Tensor:
        """Return the inverse of the loss scale that the gradients still have in them."""
        pairs = zip(self.sources, grads, strict=True)
        held = {id(source.parameter): source.name for source, grad in pairs if grad is not None}
        loss_scaling.check_members(stepped, held)
        device = self._planner.world.device or next(
            (g.device for g in grads if g is not None), None
        )
        return loss_scaling.inverse_scale(scaler, stepped, device or torch.device("cpu"))

    def _added(self, also: Mapping[str, float | Tensor] | None) -> list[float | Tensor]:
        given = {name: value for name, value in (also or {}).items() if value is not None}
        unknown = sorted(set(given) - set(self._also))
        if unknown:
            raise ValueError(
                f"also: {', '.join(unknown)} was not declared; give also={(*self._also, *unknown)} "
                "when the GradClipper is built"
            )
        for name, value in given.items():
            if isinstance(value, Tensor) and value.dim():
                raise ValueError(f"also[{name!r}] has shape {tuple(value.shape)}; give one number")
        values = [given.get(name, 0.0) for name in self._also]
        return [
            compat.local_tensor(v).detach() if isinstance(v, Tensor) else float(v) for v in values
        ]

    def _planned(self, grads: Sequence[Tensor | None]) -> tuple[Plan, bool]:
        """Return the plan for these gradients, made anew only if their set has changed."""
        signature = compat.signatures(grads)
        if self._plan is not None and signature == self._signature:
            self._signature = signature  # often the same objects again, which compare faster
            return self._plan, False
        made = plan.make(
            self._planner,
            list(zip(self.sources, grads, strict=True)),
            self._lanes,
            self._agreed.key_of if self._agreed.keys else None,
            self._agreed.numbers,
            maximum=norm.is_maximum(self._p),
            accept=exactness.accept(self._p, self._lanes.window),
        )
        if self._lanes.window is not None:
            made.build = exactness.builder(self._lanes.window)
        self._plan = None if made.problems else made
        if self.overlap is not None and self._plan is not None:
            self.overlap.follow(self._plan)
        self._signature = signature
        return made, True
