"""What a GradClipper can be asked between steps, and what a checkpoint keeps of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shardclip import compat
from shardclip.rules import Limit
from shardclip.step import ClipSettings, Skips


class ClipperState:
    """The settings and counts of a GradClipper, as attributes, and its state dict."""

    max_norm: Limit
    steps: int
    _settings: ClipSettings
    _skips: Skips

    @property
    def norm_type(self) -> float:
        """The norm's p."""
        return self._settings.norm_type

    @property
    def also(self) -> tuple[str, ...]:
        """The names of the caller's numbers."""
        return self._settings.also

    @property
    def check_replicas(self) -> int:
        """In one of how many steps copies are compared bit for bit; 0: in none."""
        return self._settings.check_replicas

    @property
    def nonfinite(self) -> str:
        """What a norm that is not finite does; may be changed between steps, on all ranks."""
        return self._settings.nonfinite

    @nonfinite.setter
    def nonfinite(self, value: str) -> None:
        self._settings = replace(self._settings, nonfinite=value)

    @property
    def on_drift(self) -> str:
        """What copies that differ in some bit do; may be changed between steps, on all ranks."""
        return self._settings.on_drift

    @on_drift.setter
    def on_drift(self, value: str) -> None:
        self._settings = replace(self._settings, on_drift=value)

    @property
    def max_consecutive_skips(self) -> int | None:
        """How many steps in a row may be skipped; may be changed between steps, on all ranks."""
        return self._settings.max_consecutive_skips

    @max_consecutive_skips.setter
    def max_consecutive_skips(self, value: int | None) -> None:
        self._settings = replace(self._settings, max_consecutive_skips=value)

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
