"""GradClipper: clipping for a training loop, worked out once."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import adapters, agreement, compat, gradients, norm, plan, reduce, verdict
from .adapters import Read
from .clip import NO_GRADIENTS, Parameters
from .gradients import Layout, Source
from .measure import Measured, measure
from .notices import warn_once
from .payload import Lanes
from .plan import Plan
from .reduce import Group
from .result import ClipResult
from .scale import scale_
from .world import World

POLICIES = ("propagate", "raise", "skip")


class GradClipper:
    """Clip the gradients of a sharded model by their true global norm, every step.

    ``grad *= min(1, max_norm / (total_norm + 1e-6))``. Two ranks with shards [3] and [4] and
    ``max_norm=1``: both get 5 and keep [0.6] and [0.8]. ::

        clipper = GradClipper(model, max_norm=1.0)
        ...
        loss.backward()
        result = clipper.clip_()
        if not result.skipped:  # only nonfinite="skip" skips
            optimizer.step()

    Args:
        parameters: A module (FSDP1's must be given so), an iterable of tensors or of ``(name,
            tensor)`` pairs, or a list of param groups in the optimizers' form, each with its own
            ``max_norm``. Each group is clipped by its own norm; all take one all-reduce.
        max_norm: The largest norm that is left alone, for groups without one of their own; None:
            counted and left alone. May be changed between steps.
        norm_type: 0 (counts non-zeros), any p > 0, or inf.
        group: The ranks that reduce together: a process group, a one-axis DeviceMesh, ``SELF`` for
            this rank alone, or None for the whole world. Every rank of it must call.
        layout: How plain tensors lie: ``(DeviceMesh, placements)``, or a callable from the
            parameter to that or to None. Without it plain tensors are copies on all ranks that
            have a parameter of the same name, shape and dtype.
        nonfinite: What a NaN or infinite norm does. "propagate": what torch does. "raise": every
            rank raises ``NonFiniteGradientError`` with the parameters and the ranks. "skip": the
            gradients stay as they are, ``result.skipped`` says so, ``clipper.skipped`` counts it.
            The last two cost one host sync on CUDA.
        norms: "parameter" or "module": ``ClipResult.norms`` has the norms of every parameter, or of
            every module that owns parameters, over all ranks, from the same all-reduce.
        also: Names of numbers that ``clip_(also={...})`` sums over the ranks in the same
            all-reduce; not with p = inf.
        grad: From a parameter to its gradient, where that is not ``.grad``.

    Raises:
        ValueError: An argument is wrong; or, on every rank alike, a layout is.
        TypeError: An argument has the wrong type.

    Communication:
        Building it communicates once, a few all-gathers of names and lanes, so every rank of the
        group must build it. Each ``clip_()`` makes one all-reduce and nothing else.
    """

    def __init__(
        self,
        parameters: Parameters | Iterable[Mapping[str, Any]],
        max_norm: float | None,
        norm_type: float = 2.0,
        *,
        group: Group = None,
        layout: Layout = None,
        nonfinite: str = "propagate",
        norms: str | None = None,
        also: Sequence[str] = (),
        grad: Read | None = None,
    ) -> None:
        self.norm_type = norm.check_norm_type(norm_type)
        self.max_norm = max_norm
        self.nonfinite = _one_of("nonfinite", nonfinite, POLICIES)
        self.also = (also,) if isinstance(also, str) else tuple(also)
        _one_of("norms", norms, (None, "parameter", "module"))
        if self.also and norm.is_maximum(self.norm_type):
            raise ValueError("also= sums, and p = inf takes the maximum; drop one")
        self.steps = 0
        self.skipped = 0
        self._world = reduce.resolve(group)
        self._read = adapters.read_grad if grad is None else grad
        self._planner = plan.Planner(self._world, layout)
        self._plan: Plan | None = None
        self._signature: list[object] = []
        self._deferred: verdict.Deferred | None = None
        self.param_groups, self._sources, problems = _grouped(parameters, self._world)
        if not problems:
            self._limits()  # raises for a wrong max_norm
        self._agreed = agreement.reach(
            self._sources,
            self._planner,
            agreement.Settings(self.norm_type, self.nonfinite, norms, self.also),
            [group.get("max_norm", "default") for group in self.param_groups],
            problems,
        )
        for missing in self._agreed.limits[len(self.param_groups) :]:  # another rank has more
            self.param_groups.append({} if missing == "default" else {"max_norm": missing})
        # Where gradients are found without a question, no function is called for each.
        direct = grad is None and all(source.span is None for source in self._sources)
        self._bare = [source.parameter for source in self._sources] if direct else []
        self._lanes = Lanes(
            len(self.param_groups),
            len(self._agreed.keys),
            0 if norm.is_maximum(self.norm_type) else self._agreed.slots,
            len(self.also),
            0 if norm.is_maximum(self.norm_type) else self._world.size,
        )
        gradients.notice_if_used_up(parameters, self._sources)
        for message in self._agreed.notices:
            warn_once(self, message)

    def clip_(self, also: Mapping[str, float | Tensor] | None = None) -> ClipResult:
        """Clip the gradients in place.

        Args:
            also: Numbers (0-dim tensors or floats) by the names declared as ``also=``, to be summed
                over the ranks; what is left out counts 0.

        Returns:
            The norm before, the coefficient, and on demand everything else.

        Raises:
            ValueError: ``max_norm`` is negative or NaN, or ``also`` has an undeclared name; or, on
                every rank alike, a gradient is Partial, on meta or of integer dtype.
            NonFiniteGradientError: On every rank alike, with ``nonfinite="raise"``.
            ReplicaMismatchError: On every rank alike: gradients that should be copies are none; on
                CUDA, after the first step, in the call after the one that found it.
            Whatever is raised, no gradient was touched.

        Communication:
            One all-reduce of float64 numbers: 6, more for groups, norms and ``also``, and 10 for
            each tensor that has copies (at most 10,240). Host syncs on CUDA: one on the first step
            after the set of gradients changes, else none with "propagate".
        """
        limits = self._limits()
        if self._deferred is not None:
            settled, self._deferred = self._deferred, None
            settled.settle(self._world)
        grads, made, fresh, added = self._prepared(also)
        measured = measure(
            made,
            grads,
            self.norm_type,
            self._world,
            strict=self.nonfinite == "raise",
            reads=fresh or self.nonfinite != "propagate",
            added=added,
        )
        self._deferred = verdict.pass_verdict(measured, self._world)
        for about, message in made.notices if fresh else ():
            warn_once(about, message)
        if self._deferred is not None:
            failed = self._deferred.failed.to(measured.total_norm.device)
            measured.total_norm = torch.where(failed, torch.nan, measured.total_norm)
        elif measured.flags().present == 0:
            warn_once(self, NO_GRADIENTS)
        coefs = self._coefs(measured, limits)
        skipped, names = self._nonfinite(measured)
        if not skipped:
            self._scale(measured, coefs)
        self.steps += 1
        self.skipped += skipped
        return ClipResult(
            measured,
            torch.ones_like(coefs) if skipped else coefs,
            keys=self._agreed.keys,
            sums=self.also,
            skipped=skipped,
            nonfinite=names,
        )

    def step(
        self, optimizer: torch.optim.Optimizer, also: Mapping[str, float | Tensor] | None = None
    ) -> ClipResult:
        """Clip, then step the optimizer, unless the step is skipped.

        Args:
            optimizer: Steps on the clipped gradients.
            also: As in ``clip_``.

        Returns:
            As ``clip_``.

        Raises:
            ValueError, NonFiniteGradientError, ReplicaMismatchError: As ``clip_``.

        Communication:
            As ``clip_``.
        """
        result = self.clip_(also)
        if not result.skipped:
            optimizer.step()
        return result

    def _gradients(self) -> list[Tensor | None]:
        if self._bare:
            return [parameter.grad for parameter in self._bare]
        return [gradients.gradient(source, self._read) for source in self._sources]

    def _limits(self) -> list[float | None]:
        """Return each group's threshold as it is now."""
        own = [group.get("max_norm", self.max_norm) for group in self.param_groups]
        return [None if limit is None else norm.check_max_norm(limit) for limit in own]

    def _prepared(
        self, also: Mapping[str, float | Tensor] | None
    ) -> tuple[list[Tensor | None], Plan, bool, list[float | Tensor]]:
        """Return the gradients, their plan, whether it is new, and the caller's numbers.

        Whatever goes wrong here on one rank is a problem of the plan: this rank still joins the
        all-reduce, and then all ranks raise.
        """
        try:
            added = self._added(also)
            grads = self._gradients()
            made, fresh = self._planned(grads)
        except Exception as error:  # a user's grad= may raise anything
            failed = Plan(self._lanes, problems=[plan.problem("GradClipper.clip_", error)])
            return [], failed, True, []
        return grads, made, fresh, added

    def _added(self, also: Mapping[str, float | Tensor] | None) -> list[float | Tensor]:
        given = {name: value for name, value in (also or {}).items() if value is not None}
        unknown = sorted(set(given) - set(self.also))
        if unknown:
            raise ValueError(
                f"also: {', '.join(unknown)} was not declared; give also={(*self.also, *unknown)} "
                "when the GradClipper is built"
            )
        for name, value in given.items():
            if isinstance(value, Tensor) and value.dim():
                raise ValueError(f"also[{name!r}] has shape {tuple(value.shape)}; give one number")
        values = [given.get(name, 0.0) for name in self.also]
        return [
            compat.local_tensor(v).detach() if isinstance(v, Tensor) else float(v) for v in values
        ]

    def _planned(self, grads: Sequence[Tensor | None]) -> tuple[Plan, bool]:
        """Return the plan for these gradients, made anew only if their set has changed."""
        signature = compat.signatures(grads)
        if self._plan is not None and signature == self._signature:
            return self._plan, False
        made = plan.make(
            self._planner,
            list(zip(self._sources, grads, strict=True)),
            self._lanes,
            self._agreed.key_of if self._agreed.keys else None,
            self._agreed.numbers,
            maximum=norm.is_maximum(self.norm_type),
        )
        self._plan = None if made.problems else made
        self._signature = signature
        return made, True

    def _coefs(self, measured: Measured, limits: Sequence[float | None]) -> Tensor:
        """Return each group's coefficient; of groups that are left alone, 1."""
        norms = measured.group_norms
        given = compat.on_host([math.inf if limit is None else limit for limit in limits])
        coefs = norm.clip_coef(norms, compat.to_device(given, norms.device))
        if None in limits:
            alone = compat.on_host([limit is None for limit in limits], torch.bool)
            coefs = torch.where(compat.to_device(alone, norms.device), 1.0, coefs)
        if self._deferred is not None:
            coefs = torch.where(self._deferred.failed.to(coefs.device), 1.0, coefs)
        return coefs

    def _nonfinite(self, measured: Measured) -> tuple[bool, list[str] | None]:
        """Decide whether the step is skipped; find names while the gradients still have them."""
        if not measured.read:
            return False, None
        if math.isfinite(float(measured.total_norm)):
            return False, None
        return self.nonfinite == "skip", verdict.nonfinite_names(measured)

    def _scale(self, measured: Measured, coefs: Tensor) -> None:
        for group, factor in enumerate(coefs.tolist() if measured.read else coefs):
            if measured.read and factor == 1:
                continue  # nothing is touched, nor even collected
            scale_(measured.targets(group), factor)


def _one_of(what: str, value: str | None, choices: Sequence[str | None]) -> str:
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return str(value)


def _grouped(
    parameters: Any, world: World
) -> tuple[list[dict[str, Any]], list[Source], list[tuple[str, str]]]:
    """Return the param groups' settings, all sources, and what was wrong.

    A parameter counts in its first group.
    """
    try:
        if isinstance(parameters, nn.Module):
            return [{}], adapters.module_sources(parameters, world), []
        listed: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not (listed and all(isinstance(entry, Mapping) for entry in listed)):
            return [{}], gradients.unique(gradients.of_iterable(listed, "group0.{}")), []
        sources: list[Source] = []
        groups = []
        for index, entry in enumerate(listed):
            sources += gradients.of_iterable(_members(entry, index), f"group{index}.{{}}", index)
            groups.append({key: value for key, value in entry.items() if key == "max_norm"})
    except Exception as error:  # what one rank hands over may be wrong on that rank alone
        return [{}], [], [plan.problem("parameters", error)]
    return groups, gradients.unique(sources), []


def _members(group: Mapping[str, Any], index: int) -> list[Any]:
    if "params" not in group:
        raise ValueError(f"param group {index} has no 'params'; it has {', '.join(group)}")
    held = group["params"]
    held = [held] if isinstance(held, Tensor) else list(held)
    names = group.get("param_names")
    return list(zip(names, held, strict=True)) if names else held
