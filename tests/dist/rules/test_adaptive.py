"""Adaptive thresholds on real ranks: the same bits on all, one all-reduce, kept by a checkpoint."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardclip import GradClipper
from shardclip.rules.adaptive import AutoClip, LinearWarmup, RunningMean, ZClip
from tests.dist.costs.test_unread_lanes import as_on_a_device
from tests.ranks import on_ranks, raised_everywhere, run_on_ranks, same_everywhere
from tests.ranks.clippers import counted, here, shard
from tests.ranks.tensors import S0, local_of, mesh_of, parameter, sharded

RULES = {
    "autoclip": AutoClip(50, window=3),
    "zclip": ZClip(alpha=0.5, z_thresh=2.0, warmup_steps=2),
    "mean": RunningMean(2.0, beta=0.5),
    "skip": RunningMean(2.0, beta=0.5, skip=True),
    "warmup": LinearWarmup(10.0, 1.0, 3),
}
RULE = pytest.mark.parametrize("rule", RULES)
SPREAD = [0.1, 1 / 3, 7.7, 1e-3]


def made(rule, **options):
    """A clipper of one sharded parameter, and what gives it a gradient of a norm."""
    mesh = mesh_of(dist.get_world_size())
    size = math.sqrt(sum(x * x for x in SPREAD))
    held = parameter(sharded(torch.tensor(SPREAD, dtype=torch.float64), mesh, [S0]))
    shape = local_of(held.grad).clone() / size

    def step(norm):
        local_of(held.grad).copy_(shape * norm)
        return counted(clipper)

    clipper = GradClipper([("w", held)], rule, **options)
    return clipper, step


def bits(tensor) -> list[str]:
    return [value.hex() for value in torch.as_tensor(tensor).double().flatten().tolist()]


@on_ranks(2)
def test_by_hand_on_two_ranks():
    # As in tests/rules: the medians of 4, 1, 3; a norm of 7 after 2 and 4 (m = 3, s = 1, z = 4) is
    # clipped to 3 + 2**2 / 4; twice the running mean of 1, 3 (clipped to 2), 9 (clipped to 3).
    for rule, norms, limits in (
        (AutoClip(50), [4, 1, 3], [4, 2.5, 3]),
        (ZClip(alpha=0.5, z_thresh=2.0, warmup_steps=2), [2, 4, 7], [math.inf, math.inf, 4]),
        (RunningMean(2.0, beta=0.5), [1, 3, 9], [math.inf, 2, 3]),
    ):
        _, step = made(rule)
        results = [step(norm) for norm in norms]
        assert [r.outcome.max_norm for r in results] == pytest.approx(limits, rel=3e-6)
        expected = [min(norm, limit) for norm, limit in zip(norms, limits, strict=True)]
        assert [r.clipped_norm for r in results] == pytest.approx(expected, rel=3e-6)


@RULE
@pytest.mark.parametrize("device", [False, True])
@on_ranks(2)
def test_all_ranks_have_the_same_bits(rule, device):
    rule = copy.deepcopy(RULES[rule])
    clipper, step = made(rule)
    norms = torch.rand(30, generator=torch.Generator().manual_seed(0)).exp().tolist()
    norms[11], norms[17], norms[20] = 80.0, math.nan, 9.0
    results = [step(norm) for norm in norms[:10]]
    with as_on_a_device() if device else pytest.MonkeyPatch.context():
        results += [step(norm) for norm in norms[10:]]
    assert same_everywhere([(bits(r.outcome.max_norm), bits(r.clip_coef)) for r in results])
    state = clipper.state_dict()
    kept = {name: bits(value) for name, value in state["max_norm"].items()}
    assert same_everywhere((kept, int(state["steps"]), int(state["skipped"])))
    assert not any(value.isnan().any() for value in state["max_norm"].values())
    assert sum(r.clipped or r.skipped for r in results) > 0


@on_ranks(2)
def test_groups_follow_the_total_norm_over_all_ranks():
    one, two, own = shard([3.0, 0.0]), shard([0.0, 4.0]), shard([12.0, 0.0])
    groups = [{"params": [one]}, {"params": [two]}, {"params": [own], "max_norm": 6.0}]
    clipper = GradClipper(groups, AutoClip(50, max_norm=6.5))
    counted(clipper)
    # Norms 3, 4 and 12, in all 13: the first two by 6.5 / 13, the last to its own 6.
    assert local_of(one.grad).tolist() == pytest.approx(here([1.5], [0.0]), rel=1e-5)
    assert local_of(two.grad).tolist() == pytest.approx(here([0.0], [2.0]), rel=1e-5)
    assert local_of(own.grad).tolist() == pytest.approx(here([6.0], [0.0]), rel=1e-5)


@on_ranks(2)
def test_a_group_that_one_rank_lacks_follows_too():
    groups = [{"params": [shard([3.0, 4.0])]}, {"params": []}]
    clipper = GradClipper(groups[: here(2, 1)], LinearWarmup(2.5, 2.5, 1))
    assert counted(clipper).clipped_norm == pytest.approx(2.5, rel=1e-5)


@on_ranks(2)
def test_a_spike_is_skipped_on_every_rank_on_the_device():
    made_shard = shard([3.0, 4.0])
    clipper = GradClipper([("w", made_shard)], RunningMean(2.0, skip=True))
    optimizer = torch.optim.AdamW([made_shard], lr=0.1, fused=True)
    with as_on_a_device():
        clipper.step(optimizer)  # m = 5
        for size, moves in ((1.9, True), (50.0, False), (1.0, True)):
            made_shard.grad = shard([3.0 * size, 4.0 * size]).grad
            before = local_of(made_shard).detach().clone()
            clipper.step(optimizer)
            assert torch.equal(local_of(made_shard), before) != moves
    assert clipper.skipped == 1
    assert same_everywhere(clipper.record[-2].max_norm.hex())


@on_ranks(2)
def test_another_rule_on_one_rank():
    held = shard([3.0, 4.0])
    clipper = GradClipper([("w", held)], here(ZClip(), ZClip(z_thresh=3.0)))
    said = raised_everywhere(clipper.clip_, ValueError, "max_norm= differs")
    assert "z_thresh=2.5" in said
    assert "z_thresh=3.0" in said
    assert local_of(held.grad).tolist() == here([3.0], [4.0])


def make_rule():
    def by_name(total_norm, step):
        return 2.5

    return by_name


@on_ranks(2)
def test_functions_are_told_apart_by_name_and_not_by_address():
    rule = [make_rule() for _ in range(here(1, 1000))][-1]
    assert not same_everywhere(id(rule))
    clipper = GradClipper([("w", shard([3.0, 4.0]))], rule)
    assert counted(clipper).clipped_norm == pytest.approx(2.5, rel=1e-5)
    clipper.max_norm = here(rule, lambda total_norm, step: 2.5)
    raised_everywhere(clipper.clip_, ValueError, "max_norm= differs")


@on_ranks(2)
def test_a_state_loaded_by_one_rank_alone_is_noticed():
    clipper, step = made(RunningMean(2.0))
    saved = clipper.state_dict()
    step(1.0)
    if dist.get_rank():
        clipper.load_state_dict(saved)
    raised_everywhere(clipper.clip_, ValueError, "steps= differs")


def run(rule: str, folder: str, norms: list[float], *, resume: bool) -> list:
    """Some steps, from a checkpoint or to one; the thresholds' bits."""
    clipper, step = made(copy.deepcopy(RULES[rule]), exact=True)
    state = {"clipper": clipper}
    if resume:
        dcp.load(state, checkpoint_id=folder)
    limits = [bits(step(norm).outcome.max_norm) for norm in norms]
    if not resume:
        dcp.save(state, checkpoint_id=folder)
    return [limits, clipper.steps, clipper.skipped]


@RULE
def test_a_checkpoint_is_kept_by_another_number_of_ranks(rule, tmp_path):
    norms = [1.0, 1.5, 1.2, 9.0, 1.1, 30.0, 1.3, 1.3]
    (straight, *counts), _ = run_on_ranks(2, run, rule, str(tmp_path / "a"), norms, resume=False)
    run_on_ranks(2, run, rule, str(tmp_path / "b"), norms[:4], resume=False)
    for ranks in (2, 4):
        for outcome in run_on_ranks(ranks, run, rule, str(tmp_path / "b"), norms[4:], resume=True):
            assert outcome == [straight[4:], *counts]
