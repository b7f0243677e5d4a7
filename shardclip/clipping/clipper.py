"""GradClipper: clipping for a training loop, worked out once."""

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from shardclip import compat
from shardclip.comm import Group, Lanes, reduce
from shardclip.errors import NonFiniteGradientError
from shardclip.layout import Layout, Planner, Read, grouped
from shardclip.layout import sources as gradients
from shardclip.math import DOUBLE, SINGLE, norm
from shardclip.notices import warn_once
from shardclip.plan import exactness
from shardclip.record import Record
from shardclip.rules import Limit, Rule, thresholds
from shardclip.step import (
    Begun,
    ClipResult,
    Collector,
    Judged,
    Measured,
    Pending,
    Skips,
    Strays,
    agreement,
    inspection,
    loss_scaling,
    optimizers,
    scale_,
    start,
    uneven_inputs,
    verdict,
)

from .from_frameworks import FromFrameworks
from .functions import NO_GRADIENTS, Parameters

POLICIES = ("propagate", "raise", "skip")


class GradClipper(FromFrameworks):
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
            ``max_norm``. Each group is clipped by its own norm; all take one all-reduce. A module
            is kept, and looked at in every step: parameters that were added to it or replaced
            since (a new head or adapter, ``load_state_dict(assign=True)``, ``fully_shard``, ...)
            are refused by name as soon as one has a gradient. Build the clipper anew then.
        max_norm: The largest norm that is left alone, for groups without one of their own; None:
            counted and left alone. May be changed between steps. Or a rule: one of
            ``shardclip.adaptive``, or any ``f(total_norm, step)`` that returns a number or a 0-dim
            tensor, from the total norm (float64, the same bits on every rank) and the number of
            steps before. All groups that follow it are scaled alike, by the total norm against it.
        norm_type: 0 (counts non-zeros), any p > 0, or inf.
        group: The ranks that reduce together: a process group, a one-axis DeviceMesh, ``SELF`` for
            this rank alone, or None for the whole world. Every rank of it must call.
        layout: How plain tensors lie: ``(DeviceMesh, placements)``, or a callable from the
            parameter to that or to None. Without it plain tensors are copies on all ranks that
            have a parameter of the same name, shape and dtype.
        nonfinite: What a NaN or infinite norm does. "propagate": what torch does. "raise": every
            rank raises ``NonFiniteGradientError`` with parameters, ranks, how many elements, and
            where the first one is. "skip": the gradients stay as they are, ``result.skipped`` says
            so, ``clipper.skipped`` counts it, ``result.nonfinite`` tells the same details. The last
            two cost one host sync on CUDA; the details are gathered only where something is wrong.
        norms: "parameter" or "module": ``ClipResult.norms`` has the norms of every parameter, or of
            every module that owns parameters, over all ranks, from the same all-reduce.
        also: Names of numbers that ``clip_(also={...})`` sums over the ranks in the same
            all-reduce; not with p = inf.
        grad: From a parameter to its gradient, where that is not ``.grad``.
        overlap: Sum gradients in hooks during the backward pass, as they become ready; then
            ``clip_()`` has little left but the all-reduce. For DTensor parameters (FSDP2's); plain
            ones where one process is alone. A sum is used only where torch's copy-on-write proves
            that nobody has written to the gradient since; else, and where gradients are added to in
            place or somebody else's hooks run after accumulation, ``clip_()`` sums it. What it
            cannot see is a raw pointer that was taken before the backward pass (a NumPy array of a
            gradient that stays, a collective still under way). Whatever does write in between
            (``unscale_``; not ``grad_scaler=``) then costs a copy of those gradients.
        check_replicas: Compare copies bit for bit, in every step or every so many: a flipped bit or
            a swapped pair is found. Each holder then reads its copy in full once more, and on CUDA
            such a step has one host sync. Not with p = inf.
        on_drift: "raise" a ``ReplicaMismatchError`` where they differ, or "warn" and go on where
            they differ by little.
        max_consecutive_skips: Raise ``NonFiniteGradientError`` on every rank when so many steps in
            a row were skipped.
        exact: Sum exactly and round once: norm and coefficient have the same bits on any number of
            ranks, for any split, order and device, and are float64. For p = 1 and 2.

    Attributes:
        steps: How many steps were clipped.
        record: The last 1000 of them, and where they are sent: see ``Record``. A step that raised a
            ``NonFiniteGradientError`` is among them, as skipped.

    Raises:
        ValueError: An argument is wrong; or, on every rank alike, a layout is, or settings, param
            groups or DTensors' names differ between ranks; or it is built inside ``join()``.
        TypeError: An argument has the wrong type.

    Communication:
        Building it communicates once, eight all-gathers of names and lanes, so every rank of the
        group must build it, after ``init_process_group`` and before torch's ``join()``. Each
        ``clip_()`` makes one all-reduce and nothing else. None inside ``join()``, where ranks may
        have run out of data: each of the others has what DistributedDataParallel averaged whole
        and measures alone. Copies are not proved there, and ``steps`` and ``skipped`` count this
        rank's own steps.
    """

    def __init__(
        self,
        parameters: Parameters | Iterable[Mapping[str, Any]],
        max_norm: Limit,
        norm_type: float = 2.0,
        *,
        group: Group = None,
        layout: Layout = None,
        nonfinite: str = "propagate",
        norms: str | None = None,
        also: Sequence[str] = (),
        grad: Read | None = None,
        overlap: bool = False,
        check_replicas: bool | int = False,
        on_drift: str = "raise",
        max_consecutive_skips: int | None = None,
        exact: bool = False,
    ) -> None:
        self.norm_type = norm.check_norm_type(norm_type)
        self.max_norm = max_norm
        self.nonfinite = _one_of("nonfinite", nonfinite, POLICIES)
        self.also = (also,) if isinstance(also, str) else tuple(also)
        _one_of("norms", norms, (None, "parameter", "module"))
        if self.also and norm.is_maximum(self.norm_type):
            raise ValueError("also= sums, and p = inf takes the maximum; drop one")
        self.check_replicas = int(check_replicas)
        if self.check_replicas < 0 or (check_replicas and norm.is_maximum(self.norm_type)):
            raise ValueError(
                f"check_replicas must be False, True or a number of steps, got {check_replicas!r}"
                if self.check_replicas < 0
                else "check_replicas= needs sums, and p = inf takes the maximum; drop one"
            )
        self.on_drift = _one_of("on_drift", on_drift, ("raise", "warn"))
        self.max_consecutive_skips = max_consecutive_skips
        if max_consecutive_skips is not None and max_consecutive_skips < 1:
            raise ValueError(
                f"max_consecutive_skips must be at least 1, got {max_consecutive_skips}"
            )
        self.steps = 0
        self.record = Record()
        self._alike: dict[str, object] = {}  # what else ranks must have alike in a step
        self.result: ClipResult | None = None
        self._skips = Skips()
        self._had_gradients = False  # some rank, as far as this one knows
        self._silent = 0  # steps before that
        self._later: Any = None  # what takes the factor where a framework multiplies by it
        self._under_way: tuple[weakref.ref[Pending], Begun] | None = None
        self._world = reduce.resolve(group)
        uneven_inputs.refuse_to_build(self._world)
        if exact:
            exactness.check(self.norm_type, self._world)
        planner = Planner(self._world, layout)
        self._deferred: verdict.Deferred | None = None
        self.param_groups, sources, problems = grouped(parameters, self._world)
        if not problems:
            thresholds.of_groups(self.param_groups, max_norm)  # raises for a wrong one
        self._agreed = agreement.reach(
            sources,
            planner,
            agreement.Settings(
                self.norm_type,
                self.nonfinite,
                norms,
                self.also,
                self.check_replicas,
                max_consecutive_skips,
                exact,
            ),
            [group.get("max_norm", "default") for group in self.param_groups],
            problems,
        )
        for missing in self._agreed.limits[len(self.param_groups) :]:  # another rank has more
            self.param_groups.append({} if missing == "default" else {"max_norm": missing})
        lanes = Lanes(
            len(self.param_groups),
            len(self._agreed.keys),
            0 if norm.is_maximum(self.norm_type) else self._agreed.slots,
            len(self.also),
            0 if norm.is_maximum(self.norm_type) else self._world.size,
            checks=True,
            drift=self.check_replicas > 0,
            window=(DOUBLE if self._agreed.wide else SINGLE) if exact else None,
        )
        self._collector = Collector(
            sources,
            planner,
            self._agreed,
            lanes,
            self.norm_type,
            self.also,
            grad,
            overlap,
            Strays(parameters, sources, grad),
        )
        gradients.notice_if_used_up(parameters, sources)
        seen = [] if self._collector.overlap is None else self._collector.overlap.notices
        for message in [*self._agreed.notices, *seen]:
            warn_once(self, message)

    def clip_(
        self,
        also: Mapping[str, float | Tensor] | None = None,
        *,
        grad_scaler: object = None,
        optimizers: Sequence[Optimizer] = (),
    ) -> ClipResult:
        """Clip the gradients in place.

        Args:
            also: Numbers (0-dim tensors or floats) by the names declared as ``also=``, to be summed
                over the ranks; what is left out counts 0.
            grad_scaler: A ``torch.amp.GradScaler`` that has scaled the loss. The norm is that of
                the unscaled gradients, and unscaling and clipping are one multiplication (fp16
                gradients too). Where it is not finite the gradients stay as they are, and all
                optimizers skip the step, whatever ``nonfinite`` says. The scaler is left as its
                ``unscale_`` leaves it: call ``grad_scaler.step(optimizer)`` and ``update()``.
            optimizers: With ``grad_scaler``, all that hold the gradients; they must hold no others.

        Returns:
            The norm before, the coefficient, and on demand everything else.

        Raises:
            ValueError: ``max_norm`` is negative or NaN, or ``also`` has an undeclared name; or, on
                every rank alike, a gradient is Partial, on meta or of integer dtype, or it is one
                that the clipper was not built with: of the module that it was given, or of one of
                the ``optimizers``; or, inside ``join()``, this clipper has parameters that no
                DistributedDataParallel of it averages, or ``also=``, ``check_replicas=``,
                ``max_consecutive_skips=`` or a rule.
            TypeError: On every rank alike, gradients were given in place of parameters: nothing on
                this rank has a gradient or could.
            RuntimeError: A step is under way (``start``), or the scaler is not at this stage. The
                clipper was built before ``init_process_group``, or its group was destroyed.
            NonFiniteGradientError: On every rank alike, with ``nonfinite="raise"``.
            ReplicaMismatchError: On every rank alike: gradients that should be copies are none; on
                CUDA, after the first step, in the call after the one that found it.
            Whatever is raised, no gradient was touched (but where warnings are errors: they come
            when the step is through).

        Communication:
            One all-reduce of float64 numbers: 2 (3 beyond 96 ranks; 8 for p = inf), more for
            groups, norms and ``also``, 10 for each tensor that has copies (at most 10,240), and 2
            with ``check_replicas``. With ``exact`` they are int64: 22 for each sum (136 where
            parameters are float64), 69 for each of ``also``, 220 (690) for each tensor that has
            copies. Host syncs on CUDA: one on the first step after the set of gradients changes,
            else none with "propagate".
        """
        return self.start(also, grad_scaler=grad_scaler, optimizers=optimizers).finish()

    def start(
        self,
        also: Mapping[str, float | Tensor] | None = None,
        *,
        grad_scaler: object = None,
        optimizers: Sequence[Optimizer] = (),
    ) -> Pending:
        """Sum the gradients and start the all-reduce; ``finish()`` of what is returned clips.

        Other work goes in between; it must leave the gradients alone. ::

            pending = clipper.start()
            evaluate(model)
            result = pending.finish()

        Args:
            also: As in ``clip_``.
            grad_scaler: As in ``clip_``.
            optimizers: As in ``clip_``.

        Raises:
            ValueError, RuntimeError: As ``clip_``, for the arguments. What is wrong with gradients
                raises in ``finish()``.

        Communication:
            As ``clip_``; the all-reduce is waited for in ``finish()``.
        """
        begun = self._begin(also, grad_scaler, optimizers)
        pending = Pending(begun, self._finish)
        self._under_way = weakref.ref(pending), begun
        return pending

    def step(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        also: Mapping[str, float | Tensor] | None = None,
        *,
        grad_scaler: object = None,
    ) -> ClipResult:
        """Clip, then step the optimizer, unless the step is skipped.

        torch's fused Adam, AdamW, SGD and Adagrad take the coefficient into their own kernel, so
        that no pass over the gradients is made for it: see ``optimizers.factor_group``. The results
        are those of clipping first, up to rounding: the gradient that the kernel works with is
        within 2**-22 of the one that ``clip_`` leaves in float32. Afterwards ``.grad`` holds the
        clipped gradients either way. With ``nonfinite="skip"`` such a step is skipped on the
        device, with no host sync. Where the ranks do not read the lanes in the same step (CUDA,
        after the first) and copies differ, a fused optimizer does not step, another one steps on
        the gradients as they are; the next call raises.

        Args:
            optimizer: Steps on the clipped gradients; several are stepped one after the other, by
                the same norm. It may hold some of the clipper's parameters only. What it holds
                beside them must have no gradient: it would be stepped on unclipped. What is to be
                counted, but not clipped, goes into a param group with ``max_norm=None``.
            also: As in ``clip_``.
            grad_scaler: As in ``clip_``; the step is the scaler's, skipped where the norm is not
                finite. Call ``grad_scaler.update()`` afterwards.

        Returns:
            As ``clip_``.

        Raises:
            ValueError: As ``clip_``; or, on every rank alike, the optimizer holds a gradient that
                the clipper was not built with, or (one of torch's own) nothing that has a gradient
                and nothing of the clipper's, as when it was built before ``fully_shard``.
            TypeError, RuntimeError, NonFiniteGradientError, ReplicaMismatchError: As ``clip_``.

        Communication:
            As ``clip_``.
        """
        stepped = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for one in stepped:
            if not isinstance(one, Optimizer):
                raise TypeError(f"optimizer must be a torch optimizer, got {type(one).__name__}")
        into = optimizers.factor_groups(stepped, self._collector.group_of())
        if isinstance(grad_scaler, GradScaler) and not loss_scaling.is_torchs(grad_scaler):
            into = dict.fromkeys(into)  # a scaler's own step() is to be called
        begun = self._begin(also, grad_scaler, stepped, reads=None in into.values())
        judged = self._judge(begun)
        folded = [one for one in stepped if into[id(one)] is not None]
        own = {id(p) for one in folded for p in optimizers.parameters_of(one)}
        self._scale(judged, apart=frozenset(own))
        for one in stepped:
            group = into[id(one)]
            coef = None if group is None else judged.factors[group]
            if begun.scaler is not None and judged.stops is not None:
                loss_scaling.step_with_scaler(begun.scaler, one, judged.stops, coef)
            elif coef is not None:
                optimizers.step_scaled(one, coef, judged.stops)
            elif not judged.skipped:
                optimizers.step_plain(one)
        return self._result(judged)

    def _begin(
        self,
        also: Mapping[str, float | Tensor] | None,
        grad_scaler: object,
        stepped: Sequence[Optimizer],
        reads: bool = True,
    ) -> Begun:
        """Sum, and start the all-reduce.

        Args:
            also: The caller's numbers.
            grad_scaler: Has scaled the loss of the optimizers' gradients.
            stepped: Those optimizers.
            reads: Whether ``nonfinite="skip"`` must be decided on the host.
        """
        if self._under_way is not None:
            pending, lost = self._under_way
            if pending() is not None:
                raise RuntimeError("a step is under way: call finish() of what start() returned")
            self._under_way = None  # nobody can finish it any more
            lost.started.work.wait()
        limits = thresholds.of_groups(self.param_groups, self.max_norm)
        rule = thresholds.rule_of(limits)
        scaler = loss_scaling.resolve(grad_scaler, stepped, self.norm_type)
        uneven_inputs.refuse_settings(self._bound_to_all(rule), self._world)
        collector, world = self._collector.taking_part()
        if self._deferred is not None:
            settled, self._deferred = self._deferred, None
            settled.settle(world)
        self._skips.raise_beyond(self.max_consecutive_skips)
        compare = self.check_replicas > 0 and self.steps % self.check_replicas == 0
        found = collector.collect(also, scaler, stepped)
        self._had_gradients = self._had_gradients or bool(found.plan.seats)
        # A loss scale that is too large is a scaler's usual way to find the right one.
        strict = self.nonfinite == "raise" and scaler is None
        skip = self.nonfinite == "skip" or thresholds.skips(rule)
        started = start(
            found.plan,
            found.grads,
            self.norm_type,
            world,
            strict=strict,
            reads=found.fresh
            or strict
            or (skip and reads)
            or compare
            or not self._had_gradients,  # then there is nothing here that could be waited for
            compare=compare,
            added=found.added,
            settings={
                "max_norm": thresholds.named(limits),
                "nonfinite": self.nonfinite,
                "grad_scaler": scaler is not None,
                "on_drift": self.on_drift,
                "check_replicas, steps since": self.steps % max(1, self.check_replicas),
                "steps": 0 if rule is None else self.steps,
                **self._alike,
            },
        )
        return Begun(started, found, limits, world, scaler, stepped)

    def _bound_to_all(self, rule: Rule | None) -> list[str]:
        """Name the arguments for which every rank must take part in every step."""
        given = {
            "also=": bool(self.also),
            "check_replicas=": bool(self.check_replicas),
            "max_consecutive_skips=": self.max_consecutive_skips is not None,
            "max_norm= as a rule": rule is not None,
        }
        return [name for name, is_given in given.items() if is_given]

    def _finish(self, begun: Begun) -> ClipResult:
        judged = self._judge(begun)
        self._scale(judged)
        if begun.scaler is not None and judged.stops is not None:
            for optimizer in begun.optimizers:
                loss_scaling.mark_unscaled(begun.scaler, optimizer, judged.stops)
        return self._result(judged)

    def _judge(self, begun: Begun) -> Judged:
        """Conclude on all ranks alike; raise what is wrong before anything is touched."""
        self._under_way = None
        self.steps += 1
        measured = begun.started.finish(begun.found.unit)
        warns = self.on_drift == "warn"
        try:
            self._deferred = verdict.pass_verdict(measured, begun.world, warns)
        except NonFiniteGradientError:  # the step that a record is read for
            self.record.add(self._untouched(measured, begun))
            raise
        measured.notices = list(begun.found.notices)
        failed = None
        if self._deferred is not None:
            failed = self._deferred.failed.to(measured.total_norm.device)
            measured.total_norm = torch.where(failed, torch.nan, measured.total_norm)
            if compat.is_capturing():  # a replay of the graph returns to nobody who could raise
                self._deferred = None
        elif measured.flags.present == 0:
            measured.notices.append((self, self._without_gradients()))
        else:
            self._had_gradients = True
        applied = thresholds.apply(
            begun.limits, measured.group_norms, measured.total_norm, self.steps - 1
        )
        coefs = applied.coefs
        if failed is not None:
            coefs = torch.where(failed, 1.0, coefs)
        unit = begun.found.unit
        factors = coefs if unit is None else coefs * unit.to(coefs.device)
        names = self._names(measured)
        stops = applied.spiked
        if begun.scaler is not None or self.nonfinite == "skip":
            nonfinite = ~torch.isfinite(measured.total_norm)
            stops = nonfinite if stops is None else stops | nonfinite
        if stops is None:
            return Judged(measured, coefs, factors, failed, False, names, applied.limits)
        if failed is not None:
            stops = stops | failed
        coefs, factors = torch.where(stops, 1.0, coefs), torch.where(stops, 1.0, factors)
        skipped = bool(stops) if measured.read else stops
        if names is not None and self.nonfinite == "skip" and self._deferred is None:
            measured.nonfinite = inspection.nonfinite(measured, begun.world)
        return Judged(measured, coefs, factors, stops, skipped, names, applied.limits)

    def _without_gradients(self) -> str:
        """Say that there are none: again, if ever more rarely, while there never were any."""
        if self._had_gradients:
            return NO_GRADIENTS
        self._silent += 1
        told = 10 ** (len(str(self._silent)) - 1)  # after 1, 10, 100, ... steps
        return NO_GRADIENTS if told == 1 else f"in each of the first {told} steps: {NO_GRADIENTS}"

    @staticmethod
    def _names(measured: Measured) -> list[str] | None:
        """Name what is not finite while the gradients still have it, where looking is free."""
        if not measured.read or measured.finite:
            return None
        return verdict.nonfinite_names(measured)

    def _scale(self, judged: Judged, apart: frozenset[int] = frozenset()) -> None:
        """Multiply the gradients, but for those of the parameters set apart by ``id``."""
        read = judged.measured.read
        factors = judged.factors.tolist() if read else judged.factors
        if self._later is not None:
            self._later.put(factors[0])
            return
        for group, factor in enumerate(factors):
            if read and factor == 1:
                continue  # nothing is touched, nor even collected
            scale_(judged.measured.targets(group, apart), factor)

    def _untouched(self, measured: Measured, begun: Begun) -> ClipResult:
        """Describe a step that raises and leaves the gradients alone, for the record."""
        return ClipResult(
            measured,
            torch.ones_like(measured.group_norms),
            keys=self._agreed.keys,
            sums=self.also,
            skipped=True,
            nonfinite=self._names(measured),
            max_norms=[None if callable(limit) else limit for limit in begun.limits],
            step=self.steps,
        )

    def _result(self, judged: Judged) -> ClipResult:
        self._skips.count(judged.skipped)
        self.result = result = ClipResult(
            judged.measured,
            judged.coefs,
            keys=self._agreed.keys,
            sums=self.also,
            skipped=judged.skipped,
            nonfinite=judged.names,
            max_norms=judged.limits,
            step=self.steps,
        )
        self.record.add(result)
        if self._deferred is None and not isinstance(judged.skipped, Tensor):  # all ranks know
            self._skips.raise_beyond(self.max_consecutive_skips)
        # Last: where a warning is an error, the step is through on this rank, too.
        for about, message in judged.measured.notices:
            warn_once(about, message)
        for note in judged.measured.notes:
            warnings.warn(note, stacklevel=3)
        return result

    @property
    def skipped(self) -> int:
        """How many steps were skipped; a host sync where that was decided on a device."""
        return int(self._skips.total)

    @property
    def consecutive_skips(self) -> int:
        """How many steps were skipped since the last one that was not; a host sync likewise."""
        return int(self._skips.streak)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep: counts, and the state of an adaptive ``max_norm``.

        Small tensors of fixed shapes, the same on every rank whatever the number of ranks, for
        ``torch.save`` and ``torch.distributed.checkpoint`` (the clipper itself is one of its
        ``Stateful`` objects). A rule of your own is kept where it has ``state_dict()`` and
        ``load_state_dict()``.

        Communication:
            None. A host sync where skips were counted on a device.
        """
        own = getattr(self.max_norm, "state_dict", None)
        return {
            "steps": compat.on_host(self.steps, torch.int64),
            "skipped": compat.on_host(self.skipped, torch.int64),
            "consecutive_skips": compat.on_host(self.consecutive_skips, torch.int64),
            "max_norm": {} if own is None else own(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another clipper was; every rank must load the same.

        Args:
            state: What its ``state_dict()`` returned.

        Raises:
            ValueError: It lacks something, or was another threshold's; nothing changed.
        """
        missing = {"steps", "skipped", "consecutive_skips", "max_norm"} - set(state)
        if missing:
            raise ValueError(
                f"the state lacks {', '.join(sorted(missing))}; give what a GradClipper's "
                "state_dict() returned"
            )
        load = getattr(self.max_norm, "load_state_dict", None)
        if load is not None:
            load(state["max_norm"])
        elif state["max_norm"]:
            raise ValueError(
                f"the state is that of an adaptive max_norm, but this clipper's is "
                f"{self.max_norm!r}; give it a threshold made as the saved one was"
            )
        self.steps = int(state["steps"])
        self._skips = Skips(int(state["skipped"]), int(state["consecutive_skips"]))


def _one_of(what: str, value: str | None, choices: Sequence[str | None]) -> str:
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return str(value)
