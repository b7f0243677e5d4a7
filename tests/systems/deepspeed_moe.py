"""A model with DeepSpeed's own MoE layer, and its unsharded twin."""

import torch
import torch.distributed as dist
from torch import nn

EXPERTS = 2


def expert(number: int) -> nn.Linear:
    torch.manual_seed(100 + number)
    return nn.Linear(13, 13)


class Twin(nn.Module):
    """All experts on one rank; each token goes to the one that its gate prefers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(13, 13)
        self.gate = nn.Linear(13, EXPERTS, bias=False)
        self.after = nn.Linear(13, 5)
        self.experts = nn.ModuleList(expert(number) for number in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        share = self.gate(hidden).softmax(-1)
        chosen = share.argmax(-1)
        outs = torch.stack([one(hidden) for one in self.experts])
        rows = torch.arange(len(x))
        return self.after(share[rows, chosen][:, None].to(x) * outs[chosen, rows])


class MoENet(nn.Module):
    """The same with one expert on each rank of an expert-parallel pair."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        twin = Twin()
        self.before, self.after = twin.before, twin.after
        self.moe = MoE(13, expert(0), EXPERTS, EXPERTS, 1, capacity_factor=4.0, use_rts=False)
        self.number = dist.get_rank() % EXPERTS
        layer = self.moe.deepspeed_moe
        layer.gate.wg.weight.data.copy_(twin.gate.weight.data)
        layer.experts.deepspeed_experts[0].load_state_dict(expert(self.number).state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _, _ = self.moe(self.before(x))
        return self.after(hidden)

    def twins_name(self, name: str) -> str:
        """What the twin calls this rank's parameter."""
        name = name.replace("moe.deepspeed_moe.gate.wg", "gate")
        return name.replace(
            "moe.deepspeed_moe.experts.deepspeed_experts.0", f"experts.{self.number}"
        )
