"""Settings that must be alike on all ranks: what differs is named, and nothing is touched."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from shardclip import GradClipper, clip_by_global_norm, clip_grad_norm_, get_total_norm
from tests.dist.costs.test_unread_lanes import as_on_a_device
from tests.ranks import count_collectives, on_ranks, raised_everywhere
from tests.ranks.clippers import counted, here, shard
from tests.ranks.tensors import S0, R, local_of, mesh_of, parameter, sharded
from tests.ranks.unsharded import assert_norm

POWERS = pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])


@pytest.mark.parametrize("placement", [S0, R])
@pytest.mark.parametrize("names", [("a", "b"), ("ab", "a"), ("", "ab")])
@on_ranks(2)
def test_a_parameter_that_a_rank_of_its_mesh_lists_by_another_name_or_not_at_all(names, placement):
    full = torch.tensor([3.0, 4.0])
    made = [(name, parameter(sharded(full, mesh_of(2), [placement]))) for name in here(*names)]
    said = raised_everywhere(lambda: GradClipper(made, 1.0), ValueError, "device mesh")
    for name in set(names[0]) ^ set(names[1]):
        rank = int(name in names[0])
        assert f"{name}: it lies on rank 0, 1, and rank {rank} lists no parameter of this" in said


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("groups", [(["a", "b"], ["b", "a"]), (["a", "b"], ["ab"])])
@on_ranks(2)
def test_param_groups_in_another_order_or_number_on_one_rank(groups, plain):
    one = {name: parameter(torch.ones(4)) if plain else shard([3.0, 4.0]) for name in "ab"}
    made = [{"params": [(name, one[name]) for name in names]} for names in here(*groups)]
    said = raised_everywhere(lambda: GradClipper(made, 1.0), ValueError, "param groups differ")
    assert "b is in group 1 on rank 0, group 0 on rank 1" in said


@pytest.mark.parametrize("plain", [False, True])
@on_ranks(2)
def test_two_modules_whose_parameters_share_a_name_in_two_groups(plain):
    made = [parameter(torch.ones(2)) if plain else shard([1.0, 1.0]) for _ in range(2)]
    clipper = GradClipper([{"params": [("weight", one)]} for one in made], 1.0)
    assert_norm(counted(clipper).total_norm, 2.0)


@on_ranks(2)
def test_a_flat_shard_of_a_layout_that_a_rank_has_none_of():
    made = parameter(torch.tensor([3.0, 4.0]))
    clipper = GradClipper([("w", made)] * (dist.get_rank() == 0), 1.0, layout=(mesh_of(2), [S0]))
    assert_norm(counted(clipper).total_norm, 5.0)


@POWERS
@on_ranks(2)
def test_another_max_norm_on_one_rank(norm_type):
    made = shard([3.0, 4.0])
    clipper = GradClipper([("w", made)], here(1.0, 2.0), norm_type)
    before = local_of(made.grad).clone()
    said = raised_everywhere(clipper.clip_, ValueError, r"max_norm= differs")
    assert "[1.0] on rank 0" in said
    assert "[2.0] on rank 1" in said
    assert torch.equal(local_of(made.grad), before)
    clipper.max_norm = 1.0
    assert counted(clipper).clipped


@on_ranks(4)
def test_changed_on_the_last_rank_after_many_steps():
    made = shard([3.0, 4.0, 0.0, 0.0], mesh_of(4))
    clipper = GradClipper([("w", made)], 100.0)
    for _ in range(3):
        counted(clipper)
    if dist.get_rank() == 3:
        clipper.max_norm = 50.0
    raised_everywhere(clipper.clip_, ValueError, r"100\.0\] on rank 0, 1, 2; \[50\.0\] on rank 3")


@on_ranks(2)
def test_another_policy_on_one_rank():
    made = shard([3.0, 4.0])
    clipper = GradClipper([("w", made)], 1.0, nonfinite="propagate")
    clipper.nonfinite = here("propagate", "skip")
    raised_everywhere(clipper.clip_, ValueError, "nonfinite= differs", "'skip' on rank 1")


@on_ranks(2)
def test_a_loss_scaler_on_one_rank_only():
    made = shard([3.0, 4.0])
    optimizer = torch.optim.SGD([made], lr=0.1)
    clipper = GradClipper([("w", made)], 1.0)
    scaler = torch.amp.GradScaler("cpu") if dist.get_rank() else None
    if scaler is not None:
        scaler.scale(torch.zeros(()))
    raised_everywhere(
        lambda: clipper.step(optimizer, grad_scaler=scaler), ValueError, "grad_scaler= differs"
    )


@on_ranks(2)
def test_another_group_threshold_on_one_rank():
    one, other = shard([3.0, 4.0]), shard([5.0, 12.0])
    groups = [{"params": [one]}, {"params": [other], "max_norm": here(2.0, 3.0)}]
    clipper = GradClipper(groups, 1.0)
    raised_everywhere(clipper.clip_, ValueError, r"\[1\.0, 2\.0\] on rank 0; \[1\.0, 3\.0\]")


@pytest.mark.parametrize("types", [(1.0, 2.0), (2.0, math.inf), (math.inf, 0.0), (3.0, math.inf)])
@on_ranks(4)
def test_the_functions_with_another_norm_type_on_one_rank(types):
    made = shard([3.0, 4.0, 0.0, 12.0], mesh_of(4))
    p = types[dist.get_rank() == 2]
    for call in (lambda: clip_grad_norm_([made], 1.0, p), lambda: get_total_norm([made.grad], p)):
        said = raised_everywhere(call, ValueError, r"norm_type= differs")
        assert f"{types[0]} on rank 0, 1, 3; {types[1]} on rank 2" in said
    assert float(made.grad.full_tensor().norm()) == 13
    assert float(clip_grad_norm_([made], 1.0)) == 13


@on_ranks(2)
def test_the_functions_with_another_threshold_on_one_rank():
    made = shard([3.0, 4.0])
    limit = here(1.0, 2.0)
    for p in (2.0, math.inf):
        call = partial(clip_grad_norm_, [made], limit, p)
        raised_everywhere(call, ValueError, r"max_norm= differs .*1\.0 on rank 0; 2\.0 on rank 1")
    call = partial(clip_by_global_norm, [made.grad], limit)
    raised_everywhere(call, ValueError, r"clip_norm= differs")
    assert_norm(clip_grad_norm_([made], here(10, torch.tensor(10.0))), 5.0)


@on_ranks(2)
def test_the_functions_where_lanes_are_not_read():
    made = shard([3.0, 4.0])
    with as_on_a_device():
        assert clip_grad_norm_([made], here(1.0, 2.0)).isnan()
        assert float(made.grad.full_tensor().norm()) == 5
        raised_everywhere(lambda: clip_grad_norm_([made], 1.0), ValueError, "max_norm= differs")
        assert_norm(clip_grad_norm_([made], 1.0), 5.0)


@on_ranks(2)
def test_where_lanes_are_not_read_the_next_call_raises():
    made = shard([3.0, 4.0])
    clipper = GradClipper([("w", made)], 1.0)
    with as_on_a_device():
        clipper.clip_()
        made.grad = made.grad * 5
        before = local_of(made.grad).clone()
        clipper.max_norm = here(1.0, 2.0)
        with count_collectives() as calls:
            result = clipper.clip_()
        assert [call.op for call in calls] == ["all_reduce"]
        assert torch.equal(local_of(made.grad), before)
        assert math.isnan(float(result.total_norm))
        clipper.max_norm = 1.0
        raised_everywhere(clipper.clip_, ValueError, "max_norm= differs")
    assert clipper.clip_().clipped


@pytest.mark.parametrize(
    ("name", "value"),
    [("nonfinite", "ignore"), ("on_drift", "explode"), ("max_consecutive_skips", 0)],
)
def test_a_setting_that_is_changed_later_is_checked_like_the_first(name, value):
    clipper = GradClipper([torch.nn.Parameter(torch.zeros(2))], 1.0)
    before = getattr(clipper, name)
    with pytest.raises(ValueError, match=f"{name} must be"):
        setattr(clipper, name, value)
    assert getattr(clipper, name) == before


@pytest.mark.parametrize("name", ["norm_type", "also", "check_replicas"])
def test_what_the_payload_was_laid_out_for_cannot_be_changed(name):
    clipper = GradClipper([torch.nn.Parameter(torch.zeros(2))], 1.0)
    with pytest.raises(AttributeError):
        setattr(clipper, name, float("inf"))


CALLS = {
    "clip_": lambda clipper, parameters: clipper.clip_(),
    "finish": lambda clipper, parameters: clipper.start().finish(),
    "step": lambda clipper, parameters: clipper.step(torch.optim.SGD(parameters, 0.1)),
    "clip_grad_norm_": lambda clipper, parameters: clip_grad_norm_(parameters, 1.0),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_warning_points_at_the_line_that_called(call):
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    clipper = GradClipper(parameters, 1.0)
    with pytest.warns(UserWarning, match="no gradient on any rank") as warned:
        CALLS[call](clipper, parameters)
    assert {one.filename for one in warned} == {__file__}
