"""What a caller hands over, as named sources of gradients."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardclip.notices import warn_once

from .ownership import Ownership

# Inserted into parameter names by torch.compile, FSDP1, activation checkpointing and DDP.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

Layout = Any
"""``(DeviceMesh, placements)`` for all plain tensors, or a callable from a parameter to that or to
None; or None."""


@dataclass(frozen=True)
class Source:
    """One parameter (or bare tensor) and where its gradient is found.

    Attributes:
        name: What messages and results call it.
        parameter: What holds the gradient, and what ``layout`` is asked about.
        group: The param group it belongs to.
        span: Elements of the flat gradient that are this parameter's, where several share one.
        ownership: Who holds it, where an adapter knows.
        owner: The module that holds it; None where it is not known.
        begins: The element of the whole parameter, flat, that its flat gradient begins with here,
            and the whole's shape, where an adapter knows.
    """

    name: str
    parameter: Any
    group: int = 0
    span: tuple[int, int] | None = None
    ownership: Ownership | None = None
    owner: str | None = None
    begins: tuple[int, tuple[int, ...]] | None = None

    @classmethod
    def named(cls, name: str, parameter: Any, **more: Any) -> "Source":
        """Make one whose name tells its owner."""
        return cls(name, parameter, owner=name.rpartition(".")[0], **more)

    @property
    def identity(self) -> tuple[int, str]:
        """What makes it the same source when it is listed twice."""
        return id(self.parameter), "" if self.span is None else self.name


def clean(name: str) -> str:
    """Strip the prefixes that wrappers put into a fully qualified name."""
    parts = [part for part in name.split(".") if part and part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":  # DistributedDataParallel's
        parts = parts[1:]
    return ".".join(parts)


def of_iterable(
    parameters: Iterable[Any], unnamed: str = "parameters[{}]", group: int = 0
) -> list[Source]:
    """List tensors or ``(name, tensor)`` pairs.

    An entry that is neither is refused later, with all ranks: see ``adapters.check``.
    """
    sources = []
    for index, entry in enumerate(parameters):
        if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str):
            sources.append(Source.named(clean(entry[0]), entry[1], group=group))
        else:
            sources.append(Source(unnamed.format(index), entry, group))
    return sources


def notice_if_used_up(parameters: object, sources: Sequence[Source]) -> None:
    """Warn of an iterator that had nothing left; call it when all ranks are through."""
    if not sources and isinstance(parameters, Iterator):
        warn_once(
            parameters,
            "`parameters` is an empty iterator: nothing is counted or clipped on this rank. Was "
            "it used up before? Pass a list",
        )


def refuse_gradients(sources: Sequence[Source], grads: Sequence[Tensor | None]) -> None:
    """Refuse gradients that were handed over in place of the parameters that have them.

    Raises:
        TypeError: There is no gradient, and nothing that could have one.
    """
    if any(isinstance(grad, Tensor) for grad in grads):
        return
    if sources and not any(may_have_gradient(source.parameter) for source in sources):
        raise TypeError(
            f"{sources[0].name} is no parameter and has no .grad, nor has anything else that was "
            "given. Were gradients given? Give the parameters, whose .grad is clipped"
        )


def may_have_gradient(entry: object) -> bool:
    """Whether torch could ever put a gradient there; or it is no tensor, refused elsewhere."""
    if isinstance(entry, nn.Parameter) or not isinstance(entry, Tensor):
        return True
    return entry.requires_grad and (entry.is_leaf or entry.retains_grad)


def unique(sources: Iterable[Source]) -> list[Source]:
    """Keep the first of each: a parameter listed twice counts once."""
    return list({s.identity: s for s in reversed(list(sources))}.values())[::-1]


def gradient(source: Source, read: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """Read a source's gradient, or its span of a flat one."""
    if not isinstance(source.parameter, Tensor):
        return None  # refused later, with all ranks
    grad = read(source.parameter)
    if grad is None or source.span is None:
        return grad
    start, stop = source.span
    return grad.view(-1)[start:stop]
