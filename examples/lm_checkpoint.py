"""Checkpoints of a training that is stopped and goes on: written whole, or not at all.

The tensors lie in a `torch.distributed.checkpoint`, to which every rank writes its own shards. A
small file, `latest.json`, names it and holds the rest; it is replaced only once all shards are
written, so a job that is killed while it saves resumes from the checkpoint before.
"""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardclip import GradClipper


@dataclass
class Progress:
    """How far the training has come.

    Attributes:
        run: The run that is trained now.
        step: Its steps that are done.
        validation: Run -> loss on text that was not trained on, for the runs that are done.
        errors: Run -> how far its norm was from the gathered gradients', at most.
    """

    run: str
    step: int = 0
    validation: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints in a directory that all ranks share; only the newest is kept.

    Args:
        directory: Where they lie; made when the first is saved.
        settings: What decides the losses. A checkpoint with others is refused: going on from it
            would end in losses that neither settings give.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self.directory = directory
        self._settings = settings
        self._latest = directory / "latest.json"
        self._name: str | None = None

    def progress(self) -> Progress | None:
        """Return how far the newest checkpoint is, or None where there is none.

        Raises:
            ValueError: On every rank: it was saved with other settings.
        """
        found: list[Any] = [None]
        if dist.get_rank() == 0 and self._latest.exists():
            found = [json.loads(self._latest.read_text(encoding="utf-8"))]
        dist.broadcast_object_list(found)  # one rank reads, so that all see the same file
        if found[0] is None:
            return None
        self._refuse_others(found[0]["settings"])
        self._name = found[0]["name"]
        return Progress(**found[0]["progress"])

    def _refuse_others(self, saved: dict[str, Any]) -> None:
        names = sorted(saved.keys() | self._settings.keys())
        other = [
            f"{name} {saved.get(name)}, now {self._settings.get(name)}"
            for name in names
            if saved.get(name) != self._settings.get(name)
        ]
        if other:
            raise ValueError(
                f"{self.directory} holds a training with {'; '.join(other)}: start it as before, "
                "or remove that directory, or give another --checkpoint"
            )

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, clipper: GradClipper
    ) -> None:
        """Load the checkpoint whose progress was returned."""
        # These take as long to import as torch; most runs need none of them.
        from torch.distributed.checkpoint import state_dict_loader  # noqa: PLC0415
        from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415
            get_state_dict,
            set_state_dict,
        )

        assert self._name is not None
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "clipper": clipper}
        state_dict_loader.load(state, checkpoint_id=self.directory / self._name)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    def save(
        self,
        progress: Progress,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clipper: GradClipper,
    ) -> None:
        """Save, then forget the checkpoint before; every rank must call."""
        from torch.distributed.checkpoint import state_dict_saver  # noqa: PLC0415
        from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415

        former, self._name = self._name, f"{progress.run}-{progress.step}"
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "clipper": clipper}
        state_dict_saver.save(state, checkpoint_id=self.directory / self._name)
        if dist.get_rank() == 0:
            self._point(progress)
            if former not in {None, self._name}:
                shutil.rmtree(self.directory / str(former), ignore_errors=True)
        dist.barrier()

    def _point(self, progress: Progress) -> None:
        said = {"name": self._name, "settings": self._settings, "progress": asdict(progress)}
        part = self._latest.with_suffix(".part")
        part.write_text(json.dumps(said), encoding="utf-8")
        part.replace(self._latest)

    def clear(self) -> None:
        """Remove the checkpoint, on rank 0: the training is done, and the next one starts anew."""
        if self._name is None or dist.get_rank() != 0:
            return
        self._latest.unlink(missing_ok=True)
        shutil.rmtree(self.directory / self._name, ignore_errors=True)
        if not any(self.directory.iterdir()):
            self.directory.rmdir()
