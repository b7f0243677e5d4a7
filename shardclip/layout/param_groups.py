"""Parameters as a GradClipper is given them: a module, an iterable, or param groups."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardclip.comm import World
from shardclip.errors import problem

from . import adapters
from .sources import Source, of_iterable, unique

_UNNAMED = "group0.{}"


def grouped(
    parameters: Any, world: World
) -> tuple[list[dict[str, Any]], list[Source], list[tuple[str, str]]]:
    """Return the param groups' settings, all sources, and what was wrong.

    A parameter counts in its first group.
    """
    try:
        if isinstance(parameters, (nn.Module, Tensor)):
            return [{}], adapters.sources_of(parameters, world, _UNNAMED), []
        listed: list[Any] = list(parameters)
        if listed and all(isinstance(entry, Source) for entry in listed):  # from an adapter
            return [{}], unique(listed), []
        if not (listed and all(isinstance(entry, Mapping) for entry in listed)):
            return [{}], adapters.sources_of(listed, world, _UNNAMED), []
        sources: list[Source] = []
        groups = []
        for index, entry in enumerate(listed):
            sources += of_iterable(_members(entry, index), f"group{index}.{{}}", index)
            groups.append({key: value for key, value in entry.items() if key == "max_norm"})
    except Exception as error:  # what one rank hands over may be wrong on that rank alone
        return [{}], [], [problem("parameters", error)]
    return groups, unique(sources), []


def _members(group: Mapping[str, Any], index: int) -> list[Any]:
    if "params" not in group:
        raise ValueError(f"param group {index} has no 'params'; it has {', '.join(group)}")
    held = group["params"]
    held = [held] if isinstance(held, Tensor) else list(held)
    names = group.get("param_names")
    return list(zip(names, held, strict=True)) if names else held
