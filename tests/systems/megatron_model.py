"""A model of Megatron's tensor-parallel layers, and its unsharded twin."""

import torch
from torch import nn

WIDTH, INNER = 8, 12


class Twin(nn.Module):
    """The unsharded model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.norm = nn.LayerNorm(WIDTH)
        self.column = nn.Linear(WIDTH, INNER)
        self.row = nn.Linear(INNER, WIDTH)
        for one in self.parameters():
            nn.init.normal_(one, std=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.row(self.column(self.norm(x)).relu())


CUTS = {"column.weight": 0, "column.bias": 0, "row.weight": 1}


def cut(name: str, full: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """A tensor-parallel rank's part of a tensor."""
    return full.chunk(count, CUTS[name])[index] if name in CUTS else full


def batch(data_rank: int) -> torch.Tensor:
    return torch.randn(6, 2, WIDTH, generator=torch.Generator().manual_seed(data_rank))


def truth(data_ranks: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    twin = Twin().to(dtype).double()
    for rank in range(data_ranks):
        loss = twin(batch(rank).to(dtype).double()).square().mean()
        (loss / data_ranks).backward()
    return {name: one.grad for name, one in twin.named_parameters()}


def config(dtype: torch.dtype, **more):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        gradient_accumulation_fusion=False,
        **more,
    )


def sharded(settings, expert: bool = False) -> nn.Module:
    """The same model from Megatron's own layers."""
    from megatron.core import parallel_state as state
    from megatron.core import tensor_parallel as tp
    from megatron.core.transformer.module import MegatronModule

    class Net(MegatronModule):
        def __init__(self) -> None:
            super().__init__(settings)
            made = {"config": settings, "init_method": nn.init.zeros_}
            self.norm = nn.LayerNorm(WIDTH)
            self.column = tp.ColumnParallelLinear(WIDTH, INNER, gather_output=False, **made)
            self.row = tp.RowParallelLinear(
                INNER, WIDTH, bias=True, input_is_parallel=True, skip_bias_add=False, **made
            )
            if expert:
                self.expert = tp.ColumnParallelLinear(
                    WIDTH, WIDTH, gather_output=False, is_expert=True, **made
                )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.row(self.column(self.norm(x))[0].relu())[0]
            return out + self.expert(out)[0] if expert else out

    net, twin = Net(), Twin()
    rank, size = (
        state.get_tensor_model_parallel_rank(),
        state.get_tensor_model_parallel_world_size(),
    )
    for name, full in twin.named_parameters():
        net.get_parameter(name).data.copy_(cut(name, full, rank, size))
    return net.to(settings.params_dtype)
