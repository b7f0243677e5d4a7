"""GradClippers for frameworks that keep gradients elsewhere and own the step."""

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from shardclip.layout import deepspeed, deepspeed_step, megatron
from shardclip.step import scale_

Self = TypeVar("Self", bound="FromFrameworks")


class FromFrameworks:
    """The constructors of ``GradClipper`` that take a framework's own objects."""

    @classmethod
    def from_deepspeed(
        cls: type[Self], engine: Any, max_norm: float | None, norm_type: float = 2.0, **options: Any
    ) -> Self:
        """Clip a DeepSpeed engine's gradients by their true norm, inside ``engine.step()``.

        Write it once after ``deepspeed.initialize``; the loop stays as it is::

            clipper = GradClipper.from_deepspeed(engine, max_norm=1.0)
            ...
            engine.backward(loss)
            engine.step()  # clips at the accumulation boundary; then see clipper.result

        DeepSpeed's own ``gradient_clipping`` is switched off, and
        ``engine.get_global_grad_norm()`` gives this norm. The factor goes where DeepSpeed's own
        would: into the step's fp32 copy of the gradients. ``clipper.clip_()`` between backward and
        step gives the result at once, and the step does not repeat it; bf16 gradients stay as they
        are until then.

        Args:
            engine: What ``deepspeed.initialize`` returned: ZeRO stage 0, 1, 2 or 3.
            max_norm: As in the class.
            norm_type: As in the class.
            options: As in the class: ``group``, ``nonfinite``, ``norms``, ``also``.

        Raises:
            TypeError: It is no engine.
            ImportError: DeepSpeed is missing or too old.
            ValueError: An argument is wrong, or a mode of the engine is not supported.

        Communication:
            As in the class: a few all-gathers here, one all-reduce in each step.
        """
        sources = deepspeed.sources(engine)
        options.setdefault("grad", deepspeed.reader(engine))
        make: Any = cls
        clipper: Any = make(sources, max_norm, norm_type, **options)
        clipper._later = deepspeed_step.clip_in_step(engine, clipper, scale_)
        return clipper  # type: ignore[no-any-return]

    @classmethod
    def from_megatron(
        cls: type[Self],
        optimizer: Any,
        model_chunks: Sequence[nn.Module],
        max_norm: float | None,
        norm_type: float = 2.0,
        *,
        pg_collection: Any = None,
        **options: Any,
    ) -> Self:
        """Clip inside a Megatron-core optimizer's ``step()``, by the true norm over all ranks.

        Write it once after ``get_megatron_optimizer``; the loop stays as it is::

            clipper = GradClipper.from_megatron(optimizer, model_chunks, max_norm=1.0)
            ...
            success, grad_norm, num_zeros = optimizer.step()

        Tensor-parallel copies and tied embeddings count once, experts over their own groups, and
        the distributed optimizer's flat shards as what they are. Megatron's own ``clip_grad`` is
        switched off; ``grad_norm`` is this norm.

        Args:
            optimizer: What ``get_megatron_optimizer`` returned.
            model_chunks: The chunks that it was made for.
            max_norm: As in the class.
            norm_type: As in the class.
            pg_collection: Megatron's process groups; by default those of ``parallel_state``.
            options: As in the class: ``group``, ``nonfinite``, ``norms``, ``also``.

        Raises:
            ImportError: Megatron-core is missing or too old.
            ValueError: An argument is wrong, or the optimizer is of a kind that is not supported.

        Communication:
            As in the class: a few all-gathers here, one all-reduce in each step.
        """
        known = megatron.describe(optimizer, model_chunks, pg_collection)
        options = {"layout": known.layout, "grad": megatron.read, **options}
        make: Any = cls
        clipper: Self = make(known.sources, max_norm, norm_type, **options)
        megatron.clip_in_step(optimizer, clipper)
        return clipper
