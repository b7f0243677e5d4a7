"""Named lists of parameter shapes, block by block, and models too large to be built here."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

Shape = tuple[int, ...]
Block = tuple[Shape, ...]
"""What one sharded module holds: FSDP2 reduces its gradients into one buffer."""


@dataclass(frozen=True)
class Shapes:
    """A named list of shapes.

    Attributes:
        name: What a case's name calls it.
        text: What a table's heading says.
        blocks: The parameters, block by block.
    """

    name: str
    text: str
    blocks: tuple[Block, ...]

    def __iter__(self) -> Iterator[Shape]:
        """Go through all parameters."""
        return (shape for block in self.blocks for shape in block)

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum(len(block) for block in self.blocks)

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(math.prod(shape) for shape in self)


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama model.

    The shapes of Llama 3: Grattafiori et al., "The Llama 3 Herd of Models" (arXiv 2407.21783),
    table 3; parameters named as torchtitan names them.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int = 8
    vocabulary: int = 128_256

    def layer(self) -> dict[str, Shape]:
        """Name the shapes of one transformer layer."""
        hidden, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        return {
            "attention.wq.weight": (hidden, hidden),
            "attention.wk.weight": (kv, hidden),
            "attention.wv.weight": (kv, hidden),
            "attention.wo.weight": (hidden, hidden),
            "feed_forward.w1.weight": (self.ffn, hidden),
            "feed_forward.w2.weight": (hidden, self.ffn),
            "feed_forward.w3.weight": (self.ffn, hidden),
            "attention_norm.weight": (hidden,),
            "ffn_norm.weight": (hidden,),
        }

    def stage(self, index: int, stages: int) -> dict[str, Shape]:
        """Name the shapes of one pipeline stage of several."""
        first, last = (self.layers * i // stages for i in (index, index + 1))
        held: dict[str, Shape] = {}
        if index == 0:
            held["tok_embeddings.weight"] = (self.vocabulary, self.hidden)
        for layer in range(first, last):
            held |= {f"layers.{layer}.{name}": shape for name, shape in self.layer().items()}
        if index == stages - 1:
            held["norm.weight"] = (self.hidden,)
            held["output.weight"] = (self.vocabulary, self.hidden)
        return held

    @property
    def elements(self) -> int:
        """Number of elements of the whole model."""
        return sum(math.prod(shape) for shape in self.stage(0, 1).values())


LLAMA_8B = Llama("8B", 32, 4096, 14_336, 32)
LLAMA_70B = Llama("70B", 80, 8192, 28_672, 64)
LLAMA_405B = Llama("405B", 126, 16_384, 53_248, 128)


def _gpt2_small() -> Shapes:
    """Radford et al. 2019: 12 layers of width 768; the embedding is tied, so it is there once."""
    width = 768
    matrices: Block = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    vectors: Block = ((3 * width,), (width,), (4 * width,), (width,)) + ((width,),) * 4
    embeddings: Block = ((50_257, width), (1024, width), (width,), (width,))
    return Shapes("gpt2-small", "GPT-2 small", (embeddings, *((matrices + vectors,) * 12)))


def _llama_stack() -> Shapes:
    """Eight layers of Llama 3 8B at an eighth of its width and feed-forward size."""
    scaled = replace(LLAMA_8B, layers=8, hidden=512, ffn=1792, heads=32)
    block = tuple(scaled.layer().values())
    return Shapes("llama-stack", "8 layers of Llama 3 8B at 1/8 of the width", (block,) * 8)


def _equal(name: str, text: str, shape: Shape, count: int, block: int) -> Shapes:
    """List `count` parameters of one shape, `block` of them in a module."""
    sizes = [min(block, count - start) for start in range(0, count, block)]
    return Shapes(name, text, tuple((shape,) * size for size in sizes))


def _small(count: int) -> Shapes:
    name = "small" if count == 1000 else f"small-{count}"
    return _equal(name, f"{count} x (64 x 64)", (64, 64), count, 50)


def _one(name: str, text: str, elements: int) -> Shapes:
    return Shapes(name, text, (((elements,),),))


SIZES = tuple(4**power for power in range(5, 14))
"""Elements of one tensor, for the question how the error grows with the size: 1 Ki to 64 Mi."""


def _all() -> Iterator[Shapes]:
    yield _equal("layers", "24 x (1024 x 1024)", (1024, 1024), 24, 1)
    yield _gpt2_small()
    yield _llama_stack()
    yield from (_small(count) for count in (10, 100, 1000, 10_000))
    for elements in SIZES:
        size = f"{elements >> 20}Mi" if elements >= 1 << 20 else f"{elements >> 10}Ki"
        yield _one(f"one-{size}", f"one tensor of {size}", elements)


SHAPES: dict[str, Shapes] = {shapes.name: shapes for shapes in _all()}

_TINY = 8  # rows and columns of a smoke test's parameters, at most
_FEW = 4  # blocks and parameters in a block of it, at most


def tiny(shapes: Shapes) -> Shapes:
    """Shrink a list for a smoke test; the ranks still divide the rows evenly."""

    def shrink(shape: Shape) -> Shape:
        return tuple(min(size, _TINY) for size in shape)

    blocks = tuple(tuple(map(shrink, block[:_FEW])) for block in shapes.blocks[:_FEW])
    return replace(shapes, text=f"{shapes.text} shrunk", blocks=blocks)
