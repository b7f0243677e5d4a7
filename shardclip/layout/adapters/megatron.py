"""Megatron-core's conventions: who holds a parameter, by its attributes and the process groups.

======================  ==========================================================================
attribute               what it says
======================  ==========================================================================
tensor_model_parallel   True: cut over the tensor-parallel group; else copies on all of it
sequence_parallel       nothing more: a copy, once Megatron has summed its gradient over that group
allreduce               False: an expert, with expert groups in place of the dense ones
shared_embedding        a tied embedding: copies on the embedding group's stages
shared                  True on all of these but the first stage's
======================  ==========================================================================

Data-parallel ranks hold copies, or flat shards with the distributed optimizer. Other pipeline
stages hold other parameters. Follows ``megatron.core.transformer.module.param_is_not_shared``,
``tensor_parallel.param_is_not_tensor_parallel_duplicate`` and ``optimizer.clip_grads``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from shardclip import compat, extras
from shardclip.layout.sources import Source, clean

_OLDEST = "0.16"
_GROUPS = ("tp", "dp_cp", "ep", "expt_tp", "expt_dp", "embd")  # as Megatron calls them

TIED = "shared_embedding.weight"
"""What a tied embedding is called on every stage that has it."""

Placed = tuple[Any, tuple[Placement, ...]]


@dataclass(frozen=True)
class Groups:
    """This rank's process groups, as global ranks.

    Attributes:
        tp: Tensor parallel.
        dp: Data parallel, context parallel among it.
        ep: Expert parallel.
        expert_tp: Tensor parallel for experts.
        expert_dp: Data parallel for experts.
        embd: The stages with a copy of the embedding.
    """

    tp: tuple[int, ...]
    dp: tuple[int, ...]
    ep: tuple[int, ...]
    expert_tp: tuple[int, ...]
    expert_dp: tuple[int, ...]
    embd: tuple[int, ...]

    @staticmethod
    def of(collection: Any = None) -> "Groups":
        """Read a ``ProcessGroupCollection``, or what ``parallel_state`` has set up.

        Raises:
            ImportError: Megatron-core is missing or too old.
        """
        if collection is None:
            known = extras.require(
                "megatron.core.process_groups_config",
                _OLDEST,
                extra="megatron",
                distribution="megatron-core",
            )
            collection = known.ProcessGroupCollection.use_mpu_process_groups(list(_GROUPS))
        return Groups(*(_ranks(getattr(collection, name, None)) for name in _GROUPS))


def _ranks(group: Any) -> tuple[int, ...]:
    """Return a group's ranks; this one alone where there is no group or it is no member."""
    me = dist.get_rank()
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        return (me,)
    found = tuple(sorted(dist.get_process_group_ranks(group)))
    return found if me in found else (me,)


def place(parameter: Any, groups: Groups, cut_over_dp: bool = False) -> Placed:
    """Return the mesh of all ranks that have a piece of a parameter, and its placements.

    Args:
        parameter: With Megatron's attributes.
        groups: This rank's.
        cut_over_dp: The data-parallel ranks hold flat shards rather than copies.
    """
    over_dp = Shard(0) if cut_over_dp else Replicate()
    over_tp = Shard(0) if getattr(parameter, "tensor_model_parallel", False) else Replicate()
    if not getattr(parameter, "allreduce", True):
        axes = (groups.expert_dp, groups.ep, groups.expert_tp)
        return _mesh(axes), (over_dp, Shard(0), over_tp)
    if getattr(parameter, "shared_embedding", False):
        return _mesh((groups.embd, groups.dp, groups.tp)), (Replicate(), over_dp, over_tp)
    if getattr(parameter, "shared", False):
        raise ValueError(
            "it is marked `shared` but not `shared_embedding`, so the stages that hold the other "
            "copies are not known; say so with layout="
        )
    return _mesh((groups.dp, groups.tp)), (over_dp, over_tp)


@lru_cache(maxsize=64)
def _mesh(axes: tuple[tuple[int, ...], ...]) -> Any:
    """Span a mesh by groups that all have this rank: Megatron lays ranks out on a regular grid."""
    me = dist.get_rank()

    def span(start: int, rest: Sequence[tuple[int, ...]]) -> Any:
        if not rest:
            return start
        return [span(start + rank - me, rest[1:]) for rank in rest[0]]

    return compat.bare_mesh(span(me, axes))


def layout(collection: Any = None) -> Callable[[Tensor], Placed]:
    """Return the ``layout=`` of a model that follows Megatron's conventions.

    For gradients that are averaged over the data-parallel ranks and lie in full on each of them:
    in ``.grad``, or under Megatron's DDP (after ``finalize_model_grads``) in ``main_grad``::

        clip_grad_norm_(parameters, 1.0, layout=megatron.layout())
        GradClipper(model, 1.0, layout=megatron.layout(), grad=megatron.read)

    Args:
        collection: Megatron's ``ProcessGroupCollection``; by default what
            ``parallel_state.initialize_model_parallel`` has set up.

    Raises:
        ImportError: Megatron-core is missing or too old.

    Communication:
        None.
    """
    groups = Groups.of(collection)
    return lambda parameter: place(parameter, groups)


def read(parameter: Any) -> Tensor | None:
    """Return a main parameter's ``decoupled_grad``, else its ``.grad``, else its ``main_grad``."""
    for name in ("decoupled_grad", "grad", "main_grad"):
        found = getattr(parameter, name, None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    return None


@dataclass(frozen=True)
class Optimizers:
    """What a Megatron optimizer steps on.

    Attributes:
        sources: Its main parameters, by their model parameters' names.
        layout: Where they lie.
    """

    sources: list[Source]
    layout: Callable[[Tensor], Placed]


def describe(optimizer: Any, chunks: Sequence[nn.Module], collection: Any = None) -> Optimizers:
    """List the main parameters of a Megatron optimizer: full ones, or flat shards of this rank.

    Args:
        optimizer: What ``get_megatron_optimizer`` returned.
        chunks: The model chunks that it was made for.
        collection: As in ``layout``.

    Raises:
        ImportError: Megatron-core is missing or too old.
        ValueError: It holds its gradients in a way that is not known here.
    """
    groups = Groups.of(collection)
    names = {}
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            prefix = f"{index}." if len(chunks) > 1 else ""
            names[id(parameter)] = prefix + clean(name)
    sources, placed = [], {}
    for one in _each(optimizer):
        cut = hasattr(one, "shard_fp32_groups")
        _refuse_unknown(one, cut, groups)
        for model, main in _pairs(one, cut):
            tied = getattr(model, "shared_embedding", False)
            name = TIED if tied else names[id(model)]
            sources.append(Source.named(name, main))
            placed[id(main)] = place(model, groups, cut)
    return Optimizers(sources, lambda parameter: placed[id(parameter)])


def _each(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in chained if not getattr(one, "is_stub_optimizer", False)]


def _refuse_unknown(optimizer: Any, cut: bool, groups: Groups) -> None:
    """Refuse optimizers whose gradients lie elsewhere.

    Raises:
        ValueError: Always with what is wrong and what to do.
    """
    group = getattr(optimizer, "data_parallel_group", None)
    instances = (
        cut
        and group is not None
        and dist.get_world_size(group)
        not in (
            len(groups.dp),
            len(groups.expert_dp),
        )
    )
    megatron_fsdp = any(getattr(p, "__fsdp_param__", False) for p in optimizer.get_parameters())
    refused = {
        "several distributed-optimizer instances": instances,
        "Megatron-FSDP": megatron_fsdp,
        "the layer-wise optimizer": type(optimizer).__name__.startswith("LayerWise"),
    }
    for what, found in refused.items():
        if found:
            raise ValueError(
                f"{what}: shardclip does not know how its gradients lie; leave the clipping to "
                "Megatron's clip_grad"
            )


def _pairs(optimizer: Any, cut: bool) -> Iterator[tuple[Any, Any]]:
    """Pair model parameters with the main parameters that are stepped."""
    if cut:
        yield from _zipped(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
        halves, mains = optimizer.shard_float16_groups, optimizer.shard_fp32_from_float16_groups
        for models, shards, main in zip(optimizer.model_float16_groups, halves, mains, strict=True):
            for model, shard, own in zip(models, shards, main, strict=True):
                yield model, shard if own is None else own
    elif hasattr(optimizer, "float16_groups"):
        yield from _zipped(optimizer.float16_groups, optimizer.fp32_from_float16_groups)
        yield from _zipped(optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups)
    else:
        for parameter in optimizer.get_parameters():
            yield parameter, parameter


def _zipped(left: Any, right: Any) -> Iterator[tuple[Any, Any]]:
    for models, mains in zip(left, right, strict=True):
        yield from zip(models, mains, strict=True)


def clip_in_step(optimizer: Any, clipper: Any) -> None:
    """Make ``optimizer.step()`` clip where Megatron would: on unscaled gradients in fp32.

    Megatron's own clipping is switched off. ``step()`` returns this norm, as a 0-dim tensor: no
    host sync. A step that ``nonfinite="skip"`` skips returns False first, and changes nothing.
    """
    chained = hasattr(optimizer, "chained_optimizers")
    for one in _each(optimizer):
        # Alone, an optimizer only asks for the norm where it is to clip.
        one.config.clip_grad = 0.0 if chained else float("inf")
    step = optimizer.step_with_ready_grads
    step = getattr(step, "shardclip_replaced", step)

    def clip(limit: float | None = None) -> Tensor:
        return clipper.clip_().total_norm  # type: ignore[no-any-return]

    def unless_skipped() -> bool:
        return False if clipper.result.skipped else bool(step())

    unless_skipped.shardclip_replaced = step  # type: ignore[attr-defined]
    optimizer.get_grad_norm = optimizer.clip_grad_norm = clip
    optimizer.step_with_ready_grads = unless_skipped
