"""GradClipper: clipping for a training loop, worked out once."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from shardclip.comm import Group, reduce
from shardclip.layout import Layout, Planner, Read, grouped, notice_if_used_up
from shardclip.math import norm
from shardclip.notices import warn_once
from shardclip.plan import exactness
from shardclip.rules import Limit, thresholds
from shardclip.step import (
    ClipResult,
    ClipSettings,
    Collector,
    Cycle,
    Pending,
    Strays,
    loss_scaling,
    uneven_inputs,
)
from shardclip.step import (
    optimizers as stepping,
)

from .from_frameworks import FromFrameworks
from .functions import Parameters
from .state import ClipperState


class GradClipper(FromFrameworks, ClipperState, Cycle):
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
            ``clip_()`` has little left but the all-reduce. For gradients on the CPU: of DTensor
            parameters (FSDP2's), and of plain ones where one process is alone. A sum is used only
            if it is proved that its gradient is the same: the same tensor, in the same place, in
            memory that nobody has asked torch to write to since. All of torch shows there:
            ``_foreach`` calls, ``GradScaler.unscale_``, collectives, ``.data``, views, NumPy, C
            code that asks for the address. What has changed is summed again. On CUDA torch gives
            no such proof: ``clip_()`` sums all gradients there, and a warning says so. It also sums
            those of parameters that have post-accumulate hooks of others. One thing is not seen:
            who writes past torch through an address that it had before the backward pass, such as
            a NumPy array of a gradient that is kept from step to step.
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
        nonfinite: Literal["propagate", "raise", "skip"] = "propagate",
        norms: Literal["parameter", "module"] | None = None,
        also: Sequence[str] = (),
        grad: Read | None = None,
        overlap: bool = False,
        check_replicas: bool | int = False,
        on_drift: Literal["raise", "warn"] = "raise",
        max_consecutive_skips: int | None = None,
        exact: bool = False,
    ) -> None:
        settings = ClipSettings(
            norm.check_norm_type(norm_type),
            nonfinite,
            norms,
            (also,) if isinstance(also, str) else tuple(also),
            int(check_replicas),
            on_drift,
            max_consecutive_skips,
            exact,
        )
        world = reduce.resolve(group)
        uneven_inputs.refuse_to_build(world)
        if exact:
            exactness.check(settings.norm_type, world)
        param_groups, sources, problems = grouped(parameters, world)
        if not problems:
            thresholds.of_groups(param_groups, max_norm)  # raises for a wrong one
        planner = Planner(world, layout)
        agreed = settings.agree(sources, planner, param_groups, problems)
        lanes = settings.lanes(len(param_groups), agreed, world)
        strays = Strays(parameters, sources, grad)
        how = settings.norm_type, settings.also, grad, overlap
        collector = Collector(sources, planner, agreed, lanes, *how, strays)
        Cycle.__init__(self, settings, max_norm, param_groups, agreed, collector, world)
        notice_if_used_up(parameters, sources)
        seen = [] if collector.overlap is None else collector.overlap.notices
        for message in [*agreed.notices, *seen]:
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
        return self._start(also, grad_scaler, optimizers)

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
        into = stepping.factor_groups(stepped, self._collector.group_of())
        if isinstance(grad_scaler, GradScaler) and not loss_scaling.is_torchs(grad_scaler):
            into = dict.fromkeys(into)  # a scaler's own step() is to be called
        begun = self._begin(also, grad_scaler, stepped, reads=None in into.values())
        return self._finish_stepping(begun, stepped, into)
