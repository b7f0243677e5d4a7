"""A clipper's steps, one after the other: collect, sum, reduce, judge, scale, report."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardclip import compat
from shardclip.comm import World
from shardclip.errors import NonFiniteGradientError
from shardclip.notices import warn, warn_once
from shardclip.record import Record
from shardclip.rules import Limit, Rule, thresholds

from . import loss_scaling, optimizers, uneven_inputs, verdict
from .agreement import Agreement
from .collect import Collected, Collector
from .judge import judge, nonfinite_names
from .measure import Measured, start
from .pending import Begun, Judged, Pending
from .result import ClipResult
from .scale import scale_
from .settings import ClipSettings
from .skips import Skips
from .strays import NO_GRADIENTS


class Cycle:
    """What a GradClipper does in each step, and what it keeps from one to the next.

    Attributes:
        max_norm: The threshold, or the rule, of groups without one of their own.
        param_groups: The param groups' own settings.
        steps: How many steps were clipped.
        record: The last 1000 of them.
        result: The last one's.
    """

    def __init__(
        self,
        settings: ClipSettings,
        max_norm: Limit,
        param_groups: list[dict[str, Any]],
        agreed: Agreement,
        collector: Collector,
        world: World,
    ) -> None:
        """Take what was agreed on when the clipper was built."""
        self.max_norm = max_norm
        self.param_groups = param_groups
        self.steps = 0
        self.record = Record()
        self.result: ClipResult | None = None
        self._settings = settings
        self._agreed = agreed
        self._collector = collector
        self._world = world
        self._alike: dict[str, object] = {}  # what else ranks must have alike in a step
        self._skips = Skips()
        self._had_gradients = False  # some rank, as far as this one knows
        self._silent = 0  # steps before that
        self._later: Any = None  # what takes the factor where a framework multiplies by it
        self._under_way: tuple[weakref.ref[Pending], Begun] | None = None
        self._deferred: verdict.Deferred | None = None

    def _start(
        self,
        also: Mapping[str, float | Tensor] | None,
        grad_scaler: object,
        stepped: Sequence[Optimizer],
    ) -> Pending:
        begun = self._begin(also, grad_scaler, stepped)
        pending = Pending(begun, self._finish)
        self._under_way = weakref.ref(pending), begun
        return pending

    def _begin(
        self,
        also: Mapping[str, float | Tensor] | None,
        grad_scaler: object,
        stepped: Sequence[Optimizer],
        reads: bool = True,
    ) -> Begun:
        """Collect, sum, and start the all-reduce.

        Args:
            also: The caller's numbers.
            grad_scaler: Has scaled the loss of the optimizers' gradients.
            stepped: Those optimizers.
            reads: Whether ``nonfinite="skip"`` must be decided on the host.
        """
        self._claim()
        limits = thresholds.of_groups(self.param_groups, self.max_norm)
        rule = thresholds.rule_of(limits)
        scaler = loss_scaling.resolve(grad_scaler, stepped, self._settings.norm_type)
        uneven_inputs.refuse_settings(self._settings.bound_to_all(rule), self._world)
        collector, world = self._collector.taking_part()
        self._settle(world)
        found = collector.collect(also, scaler, stepped)
        self._had_gradients = self._had_gradients or bool(found.plan.seats)
        compare = self._settings.compares_at(self.steps)
        # A loss scale that is too large is a scaler's usual way to find the right one.
        strict = self._settings.nonfinite == "raise" and scaler is None
        skips = reads and (self._settings.nonfinite == "skip" or thresholds.skips(rule))
        started = start(
            found.plan,
            found.grads,
            self._settings.norm_type,
            world,
            strict=strict,
            reads=self._reads(found, strict or skips or compare),
            compare=compare,
            added=found.added,
            settings={**self._told(limits, rule, scaler is not None), **self._alike},
        )
        return Begun(started, found, limits, world, scaler, stepped)

    def _claim(self) -> None:
        """Make sure that no other step is under way."""
        if self._under_way is None:
            return
        pending, lost = self._under_way
        if pending() is not None:
            raise RuntimeError("a step is under way: call finish() of what start() returned")
        self._under_way = None  # nobody can finish it any more
        lost.started.work.wait()

    def _settle(self, world: World) -> None:
        """Raise what an earlier step has left to this one."""
        settled, self._deferred = self._deferred, None
        if settled is not None:
            settled.settle(world)
        self._skips.raise_beyond(self._settings.max_consecutive_skips)

    def _reads(self, found: Collected, asked: bool) -> bool:
        """Whether this rank reads the lanes in this step; without gradients nothing waits."""
        return found.fresh or asked or not self._had_gradients

    def _told(
        self, limits: Sequence[Limit], rule: Rule | None, scaled: bool
    ) -> Mapping[str, object]:
        """Name what all ranks must have alike in this step."""
        return {
            "max_norm": thresholds.named(limits),
            "nonfinite": self._settings.nonfinite,
            "grad_scaler": scaled,
            "on_drift": self._settings.on_drift,
            "check_replicas, steps since": self.steps % max(1, self._settings.check_replicas),
            "steps": 0 if rule is None else self.steps,
        }

    def _finish(self, begun: Begun) -> ClipResult:
        judged = self._judge(begun)
        self._scale(judged)
        if begun.scaler is not None and judged.stops is not None:
            for optimizer in begun.optimizers:
                loss_scaling.mark_unscaled(begun.scaler, optimizer, judged.stops)
        return self._report(judged)

    def _finish_stepping(
        self, begun: Begun, stepped: Sequence[Optimizer], into: Mapping[int, int | None]
    ) -> ClipResult:
        """Conclude, scale what no optimizer's own kernel scales, and step them all."""
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
        return self._report(judged)

    def _judge(self, begun: Begun) -> Judged:
        """Conclude on all ranks alike; raise what is wrong before anything is touched."""
        self._under_way = None
        self.steps += 1
        measured = begun.started.finish(begun.found.unit)
        warns = self._settings.on_drift == "warn"
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
        return judge(measured, begun, self._settings, failed, self.steps - 1)

    def _without_gradients(self) -> str:
        """Say that there are none: again, if ever more rarely, while there never were any."""
        if self._had_gradients:
            return NO_GRADIENTS
        self._silent += 1
        told = 10 ** (len(str(self._silent)) - 1)  # after 1, 10, 100, ... steps
        often = "" if told == 1 else f"in each of the first {told} steps: "
        return f"{often}{NO_GRADIENTS}"

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
            sums=self._settings.also,
            skipped=True,
            nonfinite=nonfinite_names(measured),
            max_norms=[None if callable(limit) else limit for limit in begun.limits],
            step=self.steps,
        )

    def _report(self, judged: Judged) -> ClipResult:
        """Count and record the step, and say what is left to say."""
        self._skips.count(judged.skipped)
        self.result = result = ClipResult(
            judged.measured,
            judged.coefs,
            keys=self._agreed.keys,
            sums=self._settings.also,
            skipped=judged.skipped,
            nonfinite=judged.names,
            max_norms=judged.limits,
            step=self.steps,
        )
        self.record.add(result)
        if self._deferred is None and not isinstance(judged.skipped, Tensor):  # all ranks know
            self._skips.raise_beyond(self._settings.max_consecutive_skips)
        # Last: where a warning is an error, the step is through on this rank, too.
        for about, message in judged.measured.notices:
            warn_once(about, message)
        for note in judged.measured.notes:
            warn(note)
        return result
