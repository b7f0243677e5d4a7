"""A small byte-level transformer language model, causal, with its head tied to the embedding.

Each block normalises after it adds, as the first transformers did. That form is known to need a
warm-up or clipping at a high learning rate, where the pre-norm form gets by with less; see "On
Layer Normalization in the Transformer Architecture" (Xiong et al., 2020).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Shape:
    """Sizes of a `ByteLM`; the defaults mix sizes that 4 ranks divide evenly with some they don't.

    Attributes:
        width: Features of a token between blocks.
        depth: Number of blocks.
        heads: Attention heads in each block; they divide `width`.
        hidden: Features inside each block's MLP.
        context: Longest sequence, in bytes.
    """

    width: int = 96
    depth: int = 4
    heads: int = 4
    hidden: int = 250
    context: int = 128


class Block(nn.Module):
    """Causal self-attention and an MLP, each added to the stream, which is then normalised."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, time, width)` to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = self.norm1(x + self.out(mixed.transpose(1, 2).reshape(batch, time, width)))
        added: Tensor = self.norm2(x + self.down(F.gelu(self.up(x))))
        return added


class ByteLM(nn.Module):
    """Next-byte prediction; `embedding.weight` and `head.weight` are one parameter."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte of `targets` given `tokens`, both `(batch, time)`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
