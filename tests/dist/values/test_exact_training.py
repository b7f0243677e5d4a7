"""Thirty steps of the demo's model: with exact=True the split of the gradients leaves no trace."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from shardclip import GradClipper
from tests.ranks import run_on_ranks
from tests.ranks.tensors import mesh_of, sharded

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 30
PARTED = 8  # steps in which the same training without exact=True has parted
R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS = {
    1: {"whole": ((1,), (S0,))},
    2: {"FSDP2": ((2,), (S0,)), "TP": ((2,), (S1,))},
    4: {"FSDP2": ((4,), (S0,)), "HSDP": ((2, 2), (R, S0)), "FSDP + TP": ((2, 2), (S0, S1))},
}


def _model() -> nn.Module:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    from lm_model import ByteLM, Shape

    torch.manual_seed(3)
    return ByteLM(Shape(width=16, depth=2, heads=2, hidden=22, context=16))


def trained(layout: str, exact: bool, steps: int) -> tuple[list[str], list[str], list[Tensor]]:
    """Train on gradients that every rank computes whole, but clips split as the layout says.

    Returns:
        Each step's norm and coefficient as hexadecimal, and the parameters in the end.
    """
    torch.set_num_threads(1)
    sizes, placements = LAYOUTS[dist.get_world_size()][layout]
    mesh, model = mesh_of(*sizes), _model()
    named = list(model.named_parameters())
    # Vectors have no second dim to shard: they are copies over that axis.
    laid = [
        [R if p.is_shard(dim=1) and one.dim() < 2 else p for p in placements] for _, one in named
    ]
    split = [
        nn.Parameter(sharded(one.detach(), mesh, how))
        for (_, one), how in zip(named, laid, strict=True)
    ]
    clipper = GradClipper(
        [(name, part) for (name, _), part in zip(named, split, strict=True)], 0.5, exact=exact
    )
    generator = torch.Generator().manual_seed(5)
    norms, coefs = [], []
    for _ in range(steps):
        text = torch.randint(256, (4, 17), generator=generator)
        model.zero_grad()
        model(text[:, :-1], text[:, 1:]).backward()
        for (_, one), part, how in zip(named, split, laid, strict=True):
            part.grad = sharded(one.grad, mesh, how)
        result = clipper.clip_()
        norms.append(float(result._measured.total_norm).hex())
        coefs.append(float(result._coefs[0]).hex())
        assert result.clipped
        with torch.no_grad():
            for (_, one), part in zip(named, split, strict=True):
                one.sub_(0.2 * part.grad.full_tensor())
    return norms, coefs, [one.detach().clone() for _, one in named]


def every_layout(exact: bool, steps: int) -> list:
    return [trained(layout, exact, steps) for layout in LAYOUTS[dist.get_world_size()]]


def _everywhere(exact: bool, steps: int) -> list:
    by_ranks = [run_on_ranks(ranks, every_layout, exact, steps) for ranks in LAYOUTS]
    return [run for outcomes in by_ranks for outcome in outcomes for run in outcome]


def test_norms_coefficients_and_parameters_are_the_same_bits():
    first, *others = _everywhere(exact=True, steps=STEPS)
    assert len(others) + 1 == 1 * 1 + 2 * 2 + 4 * 3
    assert len(set(first[0])) == STEPS
    for norms, coefs, parameters in others:
        assert norms == first[0]
        assert coefs == first[1]
        assert all(map(torch.equal, parameters, first[2]))


def test_without_it_they_part():
    first, *others = _everywhere(exact=False, steps=PARTED)
    assert any(norms != first[0] for norms, _, _ in others)
