"""Gradients that a GradClipper would not count: of parameters that it was not built with.

A layer or an adapter may be added, a head replaced, a weight re-parametrized, the model sharded,
when the clipper has been built already. Nothing is wrong with that until such a parameter has a
gradient: then the norm would lack it, and the optimizer would step on it unclipped.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from gc import get_referents
from itertools import accumulate, chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardclip import compat
from shardclip.layout import Read, Source, adapters, clean, refuse_gradients

from . import optimizers

NO_GRADIENTS = (
    "no gradient on any rank: the norm is 0 and nothing is clipped. Was backward() run, are the "
    "gradients kept elsewhere (DeepSpeed engines, Megatron's main_grad), was the gradient sync off "
    "(FSDP2's set_requires_gradient_sync(False)), or were the parameters replaced since they were "
    "listed (fully_shard, to_empty, load_state_dict(assign=True))?"
)
_CHANGES = (
    "a new layer, head or adapter, load_state_dict(assign=True), to_empty, weight_norm, "
    "fully_shard, FullyShardedDataParallel, ..."
)
_ANEW = f"Build the GradClipper anew after whatever adds or replaces parameters ({_CHANGES})"
_APART = (
    "What is to be counted but not clipped goes into a param group with max_norm=None; what is "
    "not to be counted needs clip_() and optimizer.step() apart"
)


class Strays:
    """Finds the gradients that one clipper does not count.

    Args:
        parameters: What the clipper was given.
        sources: What it has found there.
        read: Where it finds gradients.
    """

    def __init__(self, parameters: object, sources: Sequence[Source], read: Read | None) -> None:
        self._sources = sources
        self._known = frozenset(id(source.parameter) for source in sources)
        self._read = read
        self._module: _Members | None = None
        if isinstance(parameters, nn.Module):
            self._module = _Members(parameters, sources)

    def check(
        self, grads: Sequence[Tensor | None], stepped: Sequence[Optimizer]
    ) -> list[tuple[object, str]]:
        """Refuse gradients that are not counted; ranks may differ in this.

        In the usual step, where nothing has changed, this runs no Python for each parameter.

        Args:
            grads: The sources' gradients.
            stepped: The optimizers that are about to step.

        Returns:
            What to warn of, and about what: that an optimizer seems to move nothing.

        Raises:
            ValueError: A parameter of the module or of an optimizer has a gradient and is unknown;
                or an optimizer of torch's own holds nothing that has a gradient.
            TypeError: What was given are no parameters, and cannot have gradients.
        """
        if self._read is None:
            refuse_gradients(self._sources, grads)
        if self._module is not None:
            self._refuse([one for one in self._module.unknown() if self._has_gradient(one[1])])
        held = chain.from_iterable(map(optimizers.parameters_of, stepped))
        if not stepped or self._known.issuperset(map(id, held)):
            return []
        self._refuse(list(self._stepped_uncounted(grads, stepped)), f"{_ANEW}. {_APART}")
        return [] if self._read is not None else self._idle(grads, stepped)

    def _has_gradient(self, parameter: Tensor) -> bool:
        if self._read is None:
            return parameter.grad is not None
        return parameter.requires_grad and self._read(parameter) is not None

    @staticmethod
    def _refuse(found: Sequence[tuple[str, Tensor]], mend: str = _ANEW) -> None:
        if not found:
            return
        more = f" (one of {len(found)} such)" if len(found) > 1 else ""
        raise ValueError(
            f"{found[0][0]}: it has a gradient, but the GradClipper was not built with it{more}, "
            f"so that it would be neither counted nor clipped. {mend}"
        )

    def _stepped_uncounted(
        self, grads: Sequence[Tensor | None], stepped: Sequence[Optimizer]
    ) -> Iterable[tuple[str, Tensor]]:
        """List what the optimizers would step on, but the clipper does not count."""
        names = {} if self._module is None else self._module.names()
        counted = None if self._read is None else _memory(grads)
        for optimizer in stepped:
            for name, parameter in _named(optimizer):
                if id(parameter) in self._known or parameter.grad is None:
                    continue
                # With grad= a master copy's gradient may lie in what is clipped.
                if counted is None or not counted(parameter.grad):
                    yield names.get(id(parameter), name), parameter

    def _idle(
        self, grads: Sequence[Tensor | None], stepped: Sequence[Optimizer]
    ) -> list[tuple[object, str]]:
        """Refuse an optimizer that knows nothing of the clipper's, where gradients are left over.

        One that is not torch's own may keep copies of the parameters: then it is only warned of.
        """
        held = {id(p) for one in stepped for p in optimizers.parameters_of(one)}
        pairs = zip(self._sources, grads, strict=True)
        left = (s.name for s, grad in pairs if grad is not None and id(s.parameter) not in held)
        name = next(left, None)
        notices: list[tuple[object, str]] = []
        for one in stepped if name is not None else ():
            if not self._known.isdisjoint(map(id, optimizers.parameters_of(one))):
                continue
            text = (
                f"{name}: it has a gradient, but is in none of the optimizers, and "
                f"{type(one).__name__} holds none of the GradClipper's parameters and nothing that "
                "has a gradient: it would move nothing. Was it built before the parameters were "
                f"replaced ({_CHANGES}), or for another model? Build it from the parameters as "
                "they are now"
            )
            if not optimizers.is_watched(one):
                raise ValueError(text)
            notices.append((one, text))
        return notices


class _Members:
    """A module's parameters as they are now, besides those that are known."""

    def __init__(self, module: nn.Module, sources: Sequence[Source]) -> None:
        self._module = module
        self._known = {id(source.parameter) for source in sources}
        self._twins: dict[str, Any] = {source.name: source.parameter for source in sources}
        self._unknown: list[tuple[str, Tensor]] = []
        self._look()

    def unknown(self) -> list[tuple[str, Tensor]]:
        """List them by name; those that FSDP2 holds unsharded for a while are known as shards."""
        # One call in C lists what all these dicts hold, so that a step costs microseconds.
        parameters = get_referents(*self._held)
        if not (
            get_referents(*self._inside) == self._children
            and len(parameters) == len(self._parameters)
            and all(map(is_, parameters, self._parameters))  # == would compare tensors' values
        ):
            self._look()
        return self._unknown

    def names(self) -> dict[int, str]:
        """Name the parameters by ``id``."""
        return {id(parameter): name for name, parameter in _cleaned(self._module)}

    def _look(self) -> None:
        """Remember what is there now. Time linear in the number of parameters."""
        modules = list(self._module.modules())
        self._held: list[Any] = [module._parameters for module in modules]
        self._inside: list[Any] = [module._modules for module in modules]
        self._parameters = get_referents(*self._held)
        self._children = get_referents(*self._inside)
        self._unknown = [
            (name, parameter)
            for name, parameter in _cleaned(self._module)
            if id(parameter) not in self._known
        ]
        if self._unknown:
            self._excuse(compat.unsharded_by_fsdp(modules))

    def _excuse(self, shards: Mapping[int, int] | None) -> None:
        """Leave out what FSDP2 holds, for a while, in the place of a shard that is known."""
        self._unknown = [
            (name, parameter)
            for name, parameter in self._unknown
            if not (
                self._is_twin(name, parameter)
                if shards is None
                else shards.get(id(parameter)) in self._known
            )
        ]

    def _is_twin(self, name: str, parameter: Any) -> bool:
        shard: Any = self._twins.get(name)
        axes = parameter.device_mesh.ndim if compat.is_dtensor(parameter) else 0
        return compat.is_dtensor(shard) and axes < shard.device_mesh.ndim


def _cleaned(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return ((clean(name), parameter) for name, parameter in module.named_parameters())


def _named(optimizer: Optimizer) -> Iterable[tuple[str, Tensor]]:
    """Name an optimizer's parameters, as it does where it was given names."""
    for index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [
            f"{type(optimizer).__name__}.param_groups[{index}]['params'][{place}], of shape "
            f"{tuple(parameter.shape)}"
            for place, parameter in enumerate(group["params"])
        ]
        yield from zip(given, group["params"], strict=True)


def _memory(grads: Iterable[Tensor | None]) -> Callable[[Tensor], bool]:
    """Return a function that tells whether a gradient lies in the memory of one of these."""
    spans = sorted(_span(grad) for grad in grads if grad is not None)
    starts = [start for start, _ in spans]
    ends = list(accumulate((end for _, end in spans), max))

    def holds(grad: Tensor) -> bool:
        start, end = _span(grad)
        before = bisect_right(starts, start)
        return start == end or (before > 0 and end <= ends[before - 1])

    return holds


def _span(tensor: Tensor) -> tuple[int, int]:
    local = adapters.storage(compat.local_tensor(tensor))
    return local.data_ptr(), local.data_ptr() + local.numel() * local.element_size()
