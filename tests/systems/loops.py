"""What the loops train on two ranks, and the same training unsharded, in float64."""

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardclip import GradClipper
from tests.ranks import Collective, count_collectives, on_ranks, run_on_ranks
from tests.ranks.models import mlp
from tests.ranks.tensors import exact_norm
from tests.ranks.unsharded import assert_one_all_reduce
from tests.ranks.warned import recorded

RANKS, STEPS, ACCUMULATE = 2, 3, 2
LEARNING_RATE = 0.1
MAX_NORM = 0.5
"""Clips each of the steps; a test that counts clipped steps asserts it."""


def on_two_ranks(body):
    """The frameworks are slow on their first use; DeepSpeed compiles an extension then."""
    return on_ranks(RANKS, limit_s=300)(body)


def imported_on_ranks(*modules: str):
    """A fixture: each rank takes its time to import these before any of them communicates."""

    @pytest.fixture(scope="module", autouse=True)
    def importing():
        run_on_ranks(RANKS, import_all, modules, limit_s=300)

    return importing


def import_all(modules: tuple[str, ...]) -> None:
    with recorded():
        for module in modules:
            importlib.import_module(module)


def model() -> nn.Sequential:
    return mlp().double()


def batch(rank: int, step: int, micro: int) -> Tensor:
    seed = 100 * rank + 10 * step + micro
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64) + rank + step


def loss_of(trained: nn.Module, inputs: Tensor) -> Tensor:
    return trained(inputs).square().mean()


def clipped_descent(twin: nn.Module, max_norm: float) -> float:
    """One step down the clipped gradients, in plain torch; their exact norm before."""
    norm = exact_norm([p.grad for p in twin.parameters()], 2.0)
    factor = min(1.0, max_norm / (norm + 1e-6))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.sub_(parameter.grad, alpha=LEARNING_RATE * factor)
    return norm


def unsharded(max_norm: float = MAX_NORM) -> tuple[list[float], dict[str, Tensor]]:
    """Train on one process, in plain torch: each step's exact norm, and the parameters after."""
    twin, norms = model(), []
    for step in range(STEPS):
        twin.zero_grad()
        for rank in range(RANKS):
            for micro in range(ACCUMULATE):
                (loss_of(twin, batch(rank, step, micro)) / (RANKS * ACCUMULATE)).backward()
        norms.append(clipped_descent(twin, max_norm))
    return norms, {name: p.detach() for name, p in twin.named_parameters()}


def assert_norms(found: list, expected: list[float], rtol: float = 1e-6) -> None:
    """Each step's norm, the same on every rank; every one of them was to be clipped."""
    assert all(norm > MAX_NORM for norm in expected), expected
    assert len(found) == len(expected)
    for norm, exact in zip(found, expected, strict=True):
        assert abs(float(norm) - exact) <= rtol * exact, (found, expected)


def assert_trained(named, expected: dict[str, Tensor], rtol: float = 1e-9) -> None:
    """The parameters, whole, are those of the unsharded training."""
    found = {name: full(p) for name, p in named}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].double(),
            value.double(),
            rtol=rtol,
            atol=rtol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def full(parameter: Tensor) -> Tensor:
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach()


@contextmanager
def torchrun_environment() -> Iterator[None]:
    """The variables that torchrun sets; whatever else the block sets goes with it."""
    before = dict(os.environ)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "tests"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}  # nobody listens there
    try:
        with warnings.catch_warnings():  # the frameworks warn of much that is not ours
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", module=r"(shardclip|tests)\.")
            yield
    finally:
        os.environ.clear()
        os.environ |= before


@contextmanager
def every_clip_counted() -> Iterator[list[list[Collective]]]:
    """Record what each ``GradClipper.clip_`` of the block sends."""
    clips: list[list[Collective]] = []
    original = GradClipper.clip_

    def counted(self, *args, **kwargs):
        with count_collectives() as calls:
            result = original(self, *args, **kwargs)
        clips.append(calls)
        return result

    GradClipper.clip_ = counted
    try:
        yield clips
    finally:
        GradClipper.clip_ = original


def assert_one_all_reduce_each(clips: list[list[Collective]], steps: int = STEPS) -> None:
    assert len(clips) == steps, clips
    for calls in clips:
        assert_one_all_reduce(calls)
