"""Every way in which shardclip clips."""

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import shardclip
from benchmarks.cases import Gradients

from .clipping import MANY_MESHES, PLAIN, STEPPED, Clipping, Contender, fused_adamw


def _function(gradients: Gradients) -> Clipping:
    return Clipping(lambda max_norm: shardclip.clip_grad_norm_(gradients.target, max_norm))


def _clipper(gradients: Gradients, **settings: Any) -> Clipping:
    clipper = shardclip.GradClipper(gradients.target, max_norm=1.0, **settings)

    def clip(max_norm: float) -> Tensor:
        clipper.max_norm = max_norm
        return clipper.clip_().total_norm

    return Clipping(clip)


def _declared(gradients: Gradients) -> Clipping:
    mesh = init_device_mesh("cpu", (gradients.case.ranks,))
    return _clipper(gradients, layout=(mesh, (Replicate(),)))


def _overlapping(gradients: Gradients) -> Clipping:
    clipping = _clipper(gradients, overlap=True)

    def backward() -> None:
        """Call the hooks that the clipper registered, as FSDP2 does for its sharded gradients."""
        for parameter in gradients.parameters:
            hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            for hook in list(hooks.values()):
                hook(parameter)

    return Clipping(clipping.clip, backward)


def _exact(gradients: Gradients) -> Clipping:
    return _clipper(gradients, exact=True)


def _asynchronous(gradients: Gradients) -> Clipping:
    clipper: Any = shardclip.GradClipper(gradients.target, max_norm=1.0)

    def clip(max_norm: float) -> Tensor:
        clipper.max_norm = max_norm
        norm: Tensor = clipper.start().finish().total_norm
        return norm

    return Clipping(clip)


def _step(gradients: Gradients) -> Clipping:
    clipper = shardclip.GradClipper(gradients.target, max_norm=1.0)
    optimizer = fused_adamw(gradients)

    def step(max_norm: float) -> Tensor:
        clipper.max_norm = max_norm
        return clipper.step(optimizer).total_norm

    return Clipping(step)


def _partitions(gradients: Gradients) -> Clipping:
    mesh = init_device_mesh("cpu", (gradients.case.ranks,))
    layout = (mesh, (Shard(0),))
    return Clipping(lambda _: shardclip.get_total_norm(gradients.target, layout=layout))


_CLIPPED = PLAIN | MANY_MESHES | {"fsdp1"}
_HOOKED = frozenset({"plain"}) | MANY_MESHES  # DDP's hooks see what is not reduced yet

OURS = (
    Contender("shardclip.clip_grad_norm_", "clip", _function, _CLIPPED, first=True),
    Contender("GradClipper.clip_", "clip", _clipper, _CLIPPED, first=True),
    Contender("GradClipper(layout=)", "clip", _declared, frozenset({"ddp"})),
    Contender("GradClipper(overlap=True)", "clip", _overlapping, _HOOKED),
    Contender("GradClipper.start, finish", "clip", _asynchronous, _CLIPPED),
    Contender("GradClipper(exact=True)", "clip", _exact, _CLIPPED, only_here=True),
    Contender("GradClipper.step(AdamW)", "step", _step, STEPPED, only_here=True),
    Contender("shardclip.get_total_norm", "norm", _partitions, frozenset({"zero2"})),
)
