"""DeepSpeed: the gradients that ``engine.step()`` is about to step on.

ZeRO keeps no ``.grad``. Stages 1 and 2 flatten each param group, pad it and cut it into equal
slices, through the middle of parameters; stage 3 pads and cuts every parameter by itself. Each rank
steps on its own slices. Padding is never read.

Written against DeepSpeed's ``runtime/zero/stage_1_and_2.py``, ``stage3.py`` and
``runtime/bf16_optimizer.py``. The fragments that it hangs on parameters are of no use for stages 1
and 2: with ``round_robin_gradients`` they name the wrong ones (0.19.8).
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardclip import extras
from shardclip.layout.ownership import Ownership
from shardclip.layout.sources import Source, clean

Read = Callable[[Tensor], Tensor | None]

_OLDEST = "0.19"
_NAMED = {"extra": "deepspeed", "distribution": "deepspeed"}


def check(engine: object) -> None:
    """Refuse what is no engine, or one whose gradients this adapter does not know.

    Raises:
        TypeError: It is no ``DeepSpeedEngine``.
        ImportError: DeepSpeed is missing or too old.
        ValueError: Its mode is not supported.
    """
    deepspeed = extras.require("deepspeed", _OLDEST, **_NAMED)
    if not isinstance(engine, deepspeed.DeepSpeedEngine):
        raise TypeError(
            f"engine must be what deepspeed.initialize returns, got {type(engine).__name__}"
        )
    known: Any = engine
    optimizer = known.optimizer
    scaled = (
        known.fp16_enabled()
        or getattr(optimizer, "torch_autocast_gradscaler", None)
        or getattr(known, "torch_autocast_z0_gradscaler", None)
    )
    refused = {
        "fp16's loss scaling": scaled,
        "pipeline parallelism": known.pipeline_parallelism,
        "tensor parallelism": known.mp_world_size > 1 or known.autotp_size() > 1,
        "MiCS": type(optimizer).__name__.startswith("MiCS"),
        "NVMe offload of the optimizer": getattr(optimizer, "swap_optimizer", False),
        "ZenFlow": getattr(known, "zenflow", False),
        "SuperOffload": type(optimizer).__name__.startswith("SuperOffload"),
    }
    for mode, found in refused.items():
        if found:
            raise ValueError(
                f"the engine uses {mode}, whose gradients shardclip does not know; switch it off, "
                "or leave the clipping to DeepSpeed's gradient_clipping"
            )


def sources(engine: Any) -> list[Source]:
    """List an engine's trainable parameters, each with who holds its gradient.

    Args:
        engine: What ``deepspeed.initialize`` returned.

    Raises:
        TypeError, ImportError, ValueError: As ``check``.
    """
    check(engine)
    found = []
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            owned = _ownership(engine, parameter)
            found.append(Source.named(clean(name), parameter, ownership=owned))
    return found


def _ownership(engine: Any, parameter: nn.Parameter) -> Ownership | None:
    """Return who holds a gradient; None for stage 0's dense ones, copies on all ranks."""
    if engine.zero_optimization_stage() == 3:
        ranks = _ranks(_ds(parameter).ds_process_group)
    elif hasattr(parameter, "_hp_mapping"):
        ranks = _ranks(_ds(parameter)._dp_group)
    elif getattr(parameter, "allreduce", True):
        return None
    else:  # an expert of stage 0: copies over its own data-parallel group
        groups = extras.require("deepspeed.utils.groups", _OLDEST, **_NAMED)
        group = groups._get_expert_data_parallel_group(_ds(parameter).group_name)
        return Ownership(_ranks(group), _ranks(group))
    return Ownership((dist.get_rank(),), ranks)


def _ds(parameter: nn.Parameter) -> Any:
    """Return a parameter as it is: with what DeepSpeed has hung on it."""
    return parameter


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def reader(engine: Any) -> Read:
    """Return the function from a parameter to this rank's slice of its gradient, never a copy."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return _Stage3(optimizer)
    if hasattr(optimizer, "params_in_partition"):
        return _Stages1And2(optimizer)
    return _of_bf16_optimizer if hasattr(optimizer, "fp32_groups_gradients_flat") else _of_stage0


def _of_stage0(parameter: Tensor) -> Tensor | None:
    return parameter.grad


def _of_bf16_optimizer(parameter: Any) -> Tensor | None:
    """The optimizer has every gradient in full, and steps on this rank's slice."""
    held = parameter._hp_mapping
    if held is None:  # no element of it lies in this rank's partition
        return None
    whole = held.get_lp_grad_fragment(parameter._index_in_param_group).view(-1)
    own = held.lp_fragment_address
    return whole.narrow(0, own.start, own.numel)  # type: ignore[no-any-return]


class _Stages1And2:
    """Finds gradients of ZeRO's stages 1 and 2, with offload or without."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        groups = enumerate(optimizer.params_in_partition)
        self.places = {id(p): (g, i) for g, group in groups for i, p in enumerate(group)}
        self.filled: dict[int, list[int]] = {}  # by group, which pieces are no padding

    def __call__(self, parameter: Any) -> Tensor | None:
        if id(parameter) not in self.places:  # no element of it lies in this rank's partition
            return None
        group, index = self.places[id(parameter)]
        if self.optimizer.cpu_offload:
            flat = self.optimizer.single_partition_of_fp32_groups[group].grad
            *_, start, length = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            return None if flat is None else flat.view(-1).narrow(0, start, length)
        pieces = self.optimizer.averaged_gradients.get(group)
        if pieces is None:  # no backward since the last step
            return None
        if group not in self.filled:
            marks = [getattr(piece, "_zero_padding", False) for piece in pieces]
            self.filled[group] = [i for i, padding in enumerate(marks) if not padding]
        return pieces[self.filled[group][index]].view(-1)  # type: ignore[no-any-return]


class _Stage3:
    """Finds gradients of stage 3, with offload or without."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        groups = enumerate(optimizer.fp16_groups)
        self.places = {id(p): (g, i) for g, group in groups for i, p in enumerate(group)}

    def __call__(self, parameter: Any) -> Tensor | None:
        group, index = self.places[id(parameter)]
        _, offset, length = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        if self.optimizer.offload_optimizer:
            flat = self.optimizer.fp32_partitioned_groups_flat[group].grad
            piece = None if flat is None else flat.narrow(0, offset, length)
        else:
            pieces = self.optimizer.averaged_gradients.get(group)
            piece = None if pieces is None else pieces[index].view(-1)
        if piece is None:
            return None
        start = length * dist.get_rank(parameter.ds_process_group)
        own = min(length, max(0, parameter.ds_numel - start))  # the rest is padding
        return piece.narrow(0, 0, own)  # type: ignore[no-any-return]
