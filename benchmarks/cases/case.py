"""Cases: a list of shapes, a dtype and a layout on a number of ranks, spelled in one name."""

from dataclasses import dataclass, replace

import torch

from .shapes import SHAPES, SIZES, Shapes, tiny

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = {
    "plain": "one process",
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "hsdp": "HSDP",
    "fsdp-tp": "FSDP2 + TP",
    "two-meshes": "FSDP2 + EP, two meshes",
    "zero2": "DeepSpeed ZeRO-2",
}
"""How gradients lie: the name in a case, and in words."""

BY_FRAMEWORK = {"fsdp1", "zero2"}
"""Layouts that only their framework builds, in its default precision: fp32."""

_RANKS = 4
_PAIRS = {"hsdp", "fsdp-tp", "two-meshes"}  # one axis of these meshes has two ranks


@dataclass(frozen=True)
class Case:
    """Gradients of one layout.

    Attributes:
        layout: A key of `LAYOUTS`.
        shapes: Of the whole parameters.
        dtype: Of the gradients, a key of `DTYPES`.
        ranks: Number of processes.
    """

    layout: str
    shapes: Shapes
    dtype: str = "fp32"
    ranks: int = _RANKS

    @property
    def name(self) -> str:
        """What `--case` calls it: `layout/shapes[/dtype][@ranks]`."""
        dtype = "" if self.dtype == "fp32" else f"/{self.dtype}"
        ranks = "" if self.ranks == _usual_ranks(self.layout) else f"@{self.ranks}"
        return f"{self.layout}/{self.shapes.name}{dtype}{ranks}"

    @property
    def text(self) -> str:
        """What it is, in words."""
        where = LAYOUTS[self.layout]
        if self.layout != "plain":
            where += f" on {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{self.shapes.text}, {self.dtype}, {where}"


def parse(name: str) -> Case:
    """Read a case's name.

    Raises:
        ValueError: It is no `layout/shapes[/dtype][@ranks]`, or the layout cannot be had so.
    """
    spelled, _, ranks = name.partition("@")
    layout, shapes, *rest = [*spelled.split("/"), ""][:3]
    dtype = rest[0] if rest and rest[0] else "fp32"
    for what, value, known in (
        ("layout", layout, LAYOUTS),
        ("shapes", shapes, SHAPES),
        ("dtype", dtype, DTYPES),
    ):
        if value not in known:
            raise ValueError(f"{name}: {what} {value!r} is none of {', '.join(known)}")
    if dtype != "fp32" and layout in BY_FRAMEWORK:
        raise ValueError(f"{name}: {LAYOUTS[layout]} is built in fp32 alone")
    count = int(ranks) if ranks else _usual_ranks(layout)
    if layout == "plain" and count != 1:
        raise ValueError(f"{name}: {LAYOUTS[layout]} has one rank")
    if layout in _PAIRS and count % 2:
        raise ValueError(f"{name}: {LAYOUTS[layout]} needs an even number of ranks")
    return Case(layout, SHAPES[shapes], dtype, count)


def quick(case: Case) -> Case:
    """Return the same layout with tiny sizes, for a smoke test."""
    return replace(case, shapes=tiny(case.shapes))


def _usual_ranks(layout: str) -> int:
    return 1 if layout == "plain" else _RANKS


QUICK = (
    "fsdp2/layers",
    "hsdp/layers",
    "ddp/layers",
    "fsdp1/layers",
    "fsdp-tp/gpt2-small",
    "two-meshes/llama-stack",
    "plain/layers",
    "plain/one-64Mi/bf16",
    "fsdp2/small-10@1",
)
"""Every layout once, for a smoke test."""

TARGETED = (
    "fsdp2/layers",
    "hsdp/layers",
    "fsdp2/small",
    "plain/one-64Mi/fp16",
    "plain/one-64Mi",
    "plain/one-64Mi/bf16",
)
"""What `targets.py` asks for."""

_WORLD = ("fsdp2/layers@1", "fsdp2/layers@2", "fsdp2/layers@8")
_COUNTS = ("fsdp2/small-10", "fsdp2/small-100", "plain/small-10000")
_SIZES = tuple(
    f"plain/{name}/{dtype}".removesuffix("/fp32")
    for name, shapes in SHAPES.items()
    for dtype in DTYPES
    if shapes.count == 1 and shapes.elements in SIZES[::2]
)

DEFAULT = (
    *TARGETED,
    "plain/layers",
    "ddp/layers",
    "fsdp1/layers",
    "fsdp-tp/layers",
    "two-meshes/layers",
    "zero2/layers",
    "fsdp2/gpt2-small/bf16",
    "fsdp2/llama-stack/bf16",
    *_WORLD,
    *_COUNTS,
    *(name for name in _SIZES if name not in TARGETED),
)
"""A few minutes on two cores; every question has its picture."""

ALL = (
    *DEFAULT,
    *(
        f"{layout}/{shapes}/{dtype}".removesuffix("/fp32")
        for layout in LAYOUTS
        for shapes in ("layers", "gpt2-small", "llama-stack")
        for dtype in DTYPES
        if layout not in BY_FRAMEWORK or dtype == "fp32"
    ),
    "ddp/small",
    "hsdp/small",
    "plain/small",
    "fsdp-tp/small",
    "two-meshes/small",
    "fsdp2/small-10000",
)
"""Everything that has a name in the selections; hours, most of them for torch's first calls."""
