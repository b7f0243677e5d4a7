"""torchtitan's Llama on CPU, for the tests alone: two shims, two layers."""

import torch
from torch import Tensor, nn


def _attention(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, enable_gqa=False, **more):
    """Plain attention in place of the flexible one, which is compiled or needs CUDA."""
    heads = (one.transpose(1, 2) for one in (q_BLNH, k_BLNH, v_BLNH))
    out = nn.functional.scaled_dot_product_attention(
        *heads, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2)


def torchtitan():
    """Its Llama, with plain attention; ``preload`` has imported it for CPU."""
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention.forward = _attention
    return llama3


def _loss(output, target: Tensor) -> Tensor:
    output = output.full_tensor() if hasattr(output, "full_tensor") else output
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


class Model:
    """A parallelized model with gradients of one batch."""

    def __init__(self, world_size: int, **degrees: int) -> None:
        llama3 = torchtitan()
        from torch.distributed.fsdp import FSDPModule
        from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.distributed import ParallelDims

        axes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, **degrees}
        backend = "partial_dtensor"
        self.dims = ParallelDims(**axes, world_size=world_size, spmd_backend=backend)
        self.dims.build_mesh()
        spec = llama3.model_registry("debugmodel")
        config = spec.model
        config.layers = config.layers[:2]
        training = TrainingConfig(
            local_batch_size=4,
            seq_len=16,
            mixed_precision_param="float32",
            mixed_precision_reduce="float32",
        )
        parallelism = ParallelismConfig(
            data_parallel_shard_degree=self.dims.dp_shard,
            tensor_parallel_degree=self.dims.tp,
            pipeline_parallel_degree=self.dims.pp,
            spmd_backend=backend,
            pipeline_parallel_schedule="1F1B",
        )
        told = {
            "parallel_dims": self.dims,
            "training": training,
            "parallelism": parallelism,
            "compile_config": CompileConfig(enable=False),
            "ac_config": None,
            "dump_folder": ".",
        }

        class Settings:
            compile = CompileConfig(enable=False)
            debug = None

        Settings.parallelism, Settings.training = parallelism, training
        config.update_from_config(config=Settings)
        with torch.device("meta"):
            model = config.build()
        self.schedule = None
        if self.dims.pp_enabled:
            self.schedule, self.parts, self.first, self.last = spec.pipelining_fn(
                model,
                model_config=config,
                device=torch.device("cpu"),
                parallelize_fn=llama3.parallelize_llama,
                loss_fn=lambda output, target: (_loss(output, target), {}),
                **told,
            )
        else:
            self.parts = [llama3.parallelize_llama(model, **told)]
        torch.manual_seed(0)
        for part in self.parts:
            part.to_empty(device="cpu")
            part.init_states()
            for one in part.modules():  # its gradient divisor needs an operation that Gloo lacks
                if isinstance(one, FSDPModule):
                    one.set_force_sum_reduction_for_comms(True)

    def backward(self) -> None:
        """One batch of this data rank's."""
        batch_rank = self.dims.get_optional_mesh("batch")
        torch.manual_seed(0 if batch_rank is None else batch_rank.get_local_rank())
        inputs, target = torch.randint(0, 2048, (2, 4, 16))
        if self.schedule is None:
            _loss(self.parts[0](inputs), target).backward()
            return
        given = (inputs,) if self.first else ()
        asked = {"target": target, "losses": []} if self.last else {}
        self.schedule.step(*given, **asked)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [pair for part in self.parts for pair in part.named_parameters()]
