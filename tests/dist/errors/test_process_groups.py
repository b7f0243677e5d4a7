"""Process groups begin and end: a clipper that was built for other ranks is refused."""

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardclip import SELF, AdaptiveGradClipper, GradClipper, PerTensorClipper, clip_grad_norm_
from shardclip.comm import reduce
from shardclip.rules import adaptive
from shardclip.step import single
from tests.ranks.pool import CALL_LIMIT_S, RankPool
from tests.ranks.tensors import parameter

RANKS = 2
EARLY = "built while its process was alone, before init_process_group: every rank of the 2"
STALE = "the process group that this clipper was built for has been destroyed"


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Ranks of its own, whose process group ends and begins again."""
    made = RankPool(RANKS)
    yield made
    made.close()


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as made:
        yield made


def begin(folder: str, number: int, ranks: int, rank: int) -> None:
    name = Path(folder) / f"{number}-{ranks}-{rank if ranks == 1 else ''}"
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(name), ranks), rank=rank % ranks, world_size=ranks
    )


def gradient(rank: int) -> torch.nn.Parameter:
    return parameter(torch.tensor([3.0, 4.0]) * (rank + 1))


def ways(group=None) -> dict[str, Callable[[torch.nn.Parameter], Callable[[], object]]]:
    """From a parameter to a clipper's step."""

    def stepping(one: torch.nn.Parameter) -> Callable[[], object]:
        clipper = GradClipper([("w", one)], 1.0, group=group)
        optimizer = torch.optim.SGD([one], 1.0, fused=True)
        return lambda: clipper.step(optimizer)

    def starting(one: torch.nn.Parameter) -> Callable[[], object]:
        clipper = GradClipper([("w", one)], 1.0, group=group)
        return lambda: clipper.start().finish()

    return {
        "clip_": lambda one: GradClipper([("w", one)], 1.0, group=group).clip_,
        "start": starting,
        "step": stepping,
        "exact": lambda one: GradClipper([("w", one)], 1.0, exact=True, group=group).clip_,
        "overlap": lambda one: GradClipper([("w", one)], 1.0, overlap=True, group=group).clip_,
        "maximum": lambda one: GradClipper([("w", one)], 1.0, math.inf, group=group).clip_,
        "rule": lambda one: GradClipper([("w", one)], adaptive.AutoClip(), group=group).clip_,
        "skip": lambda one: GradClipper([("w", one)], 1.0, nonfinite="skip", group=group).clip_,
        "tensors": lambda one: PerTensorClipper([("w", one)], 1.0, group=group).clip_,
        "units": lambda one: AdaptiveGradClipper([("w", one)], group=group).clip_,
    }


def told(step: Callable[[], object]) -> str:
    try:
        step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def everything_refused(folder: str, earlier: int | None, later: int | None) -> list[str]:
    """Build with one process group (a number of ranks; None: without) and step with another."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    if earlier is not None:
        begin(folder, 1, earlier, rank)
    made = {}
    for how, build in ways().items():
        if how == "overlap" and earlier == RANKS:  # not for plain tensors of several ranks
            continue
        one = gradient(0)
        made[how] = one, one.grad.clone(), one.detach().clone(), build(one)
    if earlier is not None:
        dist.destroy_process_group()
    if later is not None:
        begin(folder, 2, later, rank)
    answers = []
    for how, (one, grad, value, step) in made.items():
        answers += [f"{how}: {told(step)}" for _ in range(2)]  # a second call is no better
        if "nothing" not in answers[-1]:
            assert torch.equal(one.grad, grad)
            assert torch.equal(one, value)
    return answers


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        (None, RANKS, EARLY),
        (1, RANKS, EARLY),
        (RANKS, RANKS, STALE),
        (RANKS, None, STALE),
        (RANKS, 1, STALE),
        (None, 1, "nothing"),
        (1, 1, "nothing"),
        (1, None, "nothing"),
    ],
)
def test_a_clipper_of_other_ranks_says_so_on_every_rank(pool, folder, earlier, later, expected):
    per_rank = pool.call(everything_refused, (folder, earlier, later), {}, CALL_LIMIT_S)
    assert per_rank[0] == per_rank[1]
    assert len(per_rank[0]) >= 18
    for answer in per_rank[0]:
        assert expected in answer
    if expected == EARLY:
        assert "group=shardclip.SELF" in per_rank[0][0]


def alone_throughout(folder: str) -> list[str]:
    rank = dist.get_rank()
    dist.destroy_process_group()
    made = [build(gradient(rank)) for build in ways(SELF).values()]
    answers = [told(step) for step in made]
    for number in range(2):
        begin(folder, number, RANKS, rank)
        made += [build(gradient(rank)) for build in ways(SELF).values()]
        answers += [told(step) for step in made]
        dist.destroy_process_group()
    return answers + [told(step) for step in made]


def test_alone_by_choice_nothing_matters(pool, folder):
    for answers in pool.call(alone_throughout, (folder,), {}, CALL_LIMIT_S):
        assert len(answers) == 10 + 20 + 30 + 30
        assert set(answers) == {"nothing"}


def groups_ended(folder: str) -> list[str]:
    del folder
    rank = dist.get_rank()
    whole = dist.new_group([0, 1])
    each = [dist.new_group([0]), dist.new_group([1])][rank]
    clippers = [GradClipper([("w", gradient(0))], 1.0, group=group) for group in (whole, each)]
    answers = [told(clipper.clip_) for clipper in clippers]
    dist.destroy_process_group(whole)
    answers.append(told(clippers[0].clip_))
    dist.destroy_process_group(each)
    answers.append(told(clippers[1].clip_))
    answers.append(told(GradClipper([("w", gradient(0))], 1.0).clip_))
    return answers


def test_a_group_that_has_ended_is_refused(pool, folder):
    for answers in pool.call(groups_ended, (folder,), {}, CALL_LIMIT_S):
        assert [answer[:20] for answer in answers] == [
            "nothing", "nothing", STALE[:20], STALE[:20], "nothing"
        ]  # fmt: skip


def functions_go_on(folder: str) -> list[float]:
    """The functions ask anew in every call, and their plans hold for the same ranks."""
    rank = dist.get_rank()
    norms = []
    one, other = gradient(0), gradient(1)

    def call() -> None:
        for _ in range(3):
            one.grad.copy_(torch.tensor([3.0, 4.0]))
            norms.append(float(clip_grad_norm_([one], 1.0)))

    dist.destroy_process_group()
    call()
    for number, ranks in enumerate((RANKS, RANKS, 1, RANKS)):
        begin(folder, number, ranks, rank)
        call()
        layout = None if ranks == 1 else _shards()
        norms.append(float(clip_grad_norm_([other], math.inf, layout=layout)))
        dist.destroy_process_group()
    call()
    return norms


def _shards():
    return init_device_mesh("cpu", (RANKS,)), (Shard(0),)


def test_functions_follow_the_process_group(pool, folder):
    for norms in pool.call(functions_go_on, (folder,), {}, CALL_LIMIT_S):
        several = [5.0] * 3 + [pytest.approx(200**0.5)]
        assert norms == [5.0] * 3 + several * 2 + [5.0] * 3 + [10.0] + several + [5.0] * 3


def verdicts_kept(folder: str) -> str:
    """A verdict that nobody has read ends with its process group: a new rank knows of none."""
    rank = dist.get_rank()

    class Verdict:
        def settle(self, world):
            raise AssertionError("settled with ranks that know nothing of it")

    single._pending[0, 1] = reduce.resolve(None), Verdict()
    dist.destroy_process_group()
    begin(folder, 1, RANKS, rank)
    said = told(lambda: clip_grad_norm_([gradient(0)], 1.0))
    assert not single._pending
    return said


def test_a_verdict_ends_with_its_process_group(pool, folder):
    assert pool.call(verdicts_kept, (folder,), {}, CALL_LIMIT_S) == ["nothing"] * RANKS
