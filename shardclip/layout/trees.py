"""Trees of tensors: lists, tuples and mappings, nested at will, as optax has them."""

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any


def check(tree: object, what: str) -> None:
    """Refuse what is no tree but one leaf.

    Raises:
        TypeError: Names it and its type.
    """
    if not _is_node(tree):
        raise TypeError(f"{what} must be a sequence of tensors, got {type(tree).__name__}")


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its path, such as ``grads['layer'][0]``.

    Mappings are gone through in the order of their keys' text, as in JAX, so that every rank finds
    the same leaf at the same place.
    """
    if not _is_node(tree):
        yield path, tree
        return
    for key in _keys(tree):
        yield from leaves(tree[key], f"{path}[{key!r}]")


def rebuilt(tree: Any, values: Iterator[Any]) -> Any:
    """Return a tree of the same structure and types, with these leaves in the order of ``leaves``.

    A sequence that is neither a list nor a tuple becomes a list.
    """
    if not _is_node(tree):
        return next(values)
    if isinstance(tree, Mapping):
        found = {key: rebuilt(tree[key], values) for key in _keys(tree)}
        if not isinstance(tree, MutableMapping):  # one that is frozen
            return type(tree)({key: found[key] for key in tree})  # type: ignore[call-arg]
        made: Any = copy.copy(tree)
        made.update(found)
        return made
    items = [rebuilt(item, values) for item in tree]
    if hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*items)
    return tuple(items) if isinstance(tree, tuple) else items


def _is_node(tree: object) -> bool:
    return isinstance(tree, (Mapping, Sequence)) and not isinstance(tree, (str, bytes))


def _keys(tree: Any) -> Sequence[Any]:
    return sorted(tree, key=repr) if isinstance(tree, Mapping) else range(len(tree))
