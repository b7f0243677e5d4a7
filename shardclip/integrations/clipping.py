"""What every loop needs: clippers built once for what it clips, and what the last step found."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from shardclip.clipping import GradClipper
from shardclip.step import ClipResult


class Clipping:
    """A loop's clipping: what it hands over step by step, clipped by clippers that are kept.

    Args:
        modules: The modules as the framework has wrapped them.
        options: ``GradClipper``'s ``group``, ``layout``, ``nonfinite`` and ``norms``. With
            ``nonfinite="skip"`` a skipped step's gradients are dropped (set to None), so that the
            loop's ``optimizer.step()`` leaves the parameters alone.

    Attributes:
        result: What the last step found and did; None before the first.
    """

    def __init__(self, modules: Sequence[nn.Module], **options: Any) -> None:
        self.result: ClipResult | None = None
        self._modules = list(modules)
        self._nonfinite = options.pop("nonfinite", None)
        self._options = options
        self._clippers: dict[tuple[Any, ...], GradClipper] = {}
        self._steps = 0
        self._clipped: Tensor | float = 0.0
        for module in self._modules:
            self.clipper(list(module.parameters()))

    def clipper(self, parameters: Sequence[Tensor], norm_type: float = 2.0) -> GradClipper:
        """Return the clipper for these parameters, built when they are first seen.

        Args:
            parameters: A module's, or some of them.
            norm_type: 0, any p > 0, or inf.

        Communication:
            A few all-gathers where it is built, as ``GradClipper``; then none.
        """
        key = (frozenset(id(p) for p in parameters if p.requires_grad), norm_type)
        if key not in self._clippers:
            found = self._named(parameters, key[0])
            self._clippers[key] = GradClipper(
                found,
                math.inf,
                norm_type,
                nonfinite=self._nonfinite or "propagate",
                **self._options,
            )
        return self._clippers[key]

    def clip_(
        self,
        parameters: Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip in place.

        Args:
            parameters: What the loop clips: a module's parameters, some of them, or one.
            max_norm: The largest norm that is left alone.
            norm_type: 0, any p > 0, or inf.
            error_if_nonfinite: Raise where the norm is NaN or infinite, unless ``options`` say what
                is to be done.

        Returns:
            The norm before clipping, 0-dim, as ``ClipResult.total_norm``.

        Raises:
            ValueError, NonFiniteGradientError, ReplicaMismatchError: As ``GradClipper.clip_``.

        Communication:
            One all-reduce, as ``GradClipper.clip_``; more where these parameters are new.
        """
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clipper = self.clipper(listed, float(norm_type))
        clipper.max_norm = max_norm
        clipper.nonfinite = self._nonfinite or ("raise" if error_if_nonfinite else "propagate")
        result = clipper.clip_()
        if result.skipped:
            for parameter in listed:
                parameter.grad = None
        self.note(result)
        return result.total_norm

    def note(self, result: ClipResult) -> None:
        """Keep a step's result and count the step; no host sync."""
        self.result = result
        self._steps += 1
        # A factor below one for a norm that is not finite scales nothing down.
        self._clipped = self._clipped + (result.clip_coef < 1) * result.total_norm.isfinite()

    def clipped_share(self) -> float:
        """Return the share of the steps since the last call whose gradients were scaled down.

        Communication:
            None; one host sync on CUDA.
        """
        share = float(self._clipped) / self._steps if self._steps else 0.0
        self._steps, self._clipped = 0, 0.0
        return share

    def _named(self, parameters: Sequence[Tensor], wanted: frozenset[int]) -> Any:
        """Return the module that has exactly these, else the parameters with their names.

        Names tell copies from other parameters, and FSDP1's parameters mean nothing without their
        module.
        """
        names: dict[int, str] = {}
        for module in self._modules:
            held = dict(module.named_parameters())
            if wanted == {id(p) for p in held.values() if p.requires_grad}:
                return module
            names.update((id(p), name) for name, p in held.items())
        if all(id(p) in names for p in parameters):
            return [(names[id(p)], p) for p in parameters]
        return list(parameters)
