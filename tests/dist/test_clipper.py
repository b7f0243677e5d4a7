"""GradClipper: groups, sums, names, and steps that follow one another."""

import json
import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardclip import ClipResult, GradClipper
from tests.ranks import count_collectives, everywhere, on_ranks, raised_everywhere
from tests.ranks.tensors import S0, labelled, local_of, mesh_of, parameter, sharded
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce

F = torch.tensor


def shard(values, mesh=None) -> nn.Parameter:
    return parameter(sharded(F(values), mesh or mesh_of(2), [S0]))


def here(*values):
    """This rank's own of the values by rank."""
    return values[dist.get_rank()]


def counted(clipper: GradClipper, *args, **options) -> ClipResult:
    with count_collectives() as calls:
        result = clipper.clip_(*args, **options)
    assert_one_all_reduce(calls)
    return result


def weights() -> list[nn.Parameter]:
    return [shard([3.0, 4.0]), shard([5.0, 12.0]), shard([8.0, 15.0])]


@pytest.mark.parametrize("form", ["tensors", "pairs", "optimizer", "named optimizer"])
@on_ranks(2)
def test_groups_are_clipped_each_by_its_own_norm_in_one_all_reduce(form):
    made = weights()
    named = [(f"layer{i}", one) for i, one in enumerate(made)]
    members = named if form in ("pairs", "named optimizer") else made
    groups = [
        {"params": members[:1], "max_norm": 1.0},
        {"params": members[1:2], "max_norm": None},
        {"params": members[2:]},
    ]
    if "optimizer" in form:
        groups = torch.optim.SGD(groups, lr=0.1).param_groups
    result = counted(GradClipper(groups, 8.5))
    assert_norm(result.total_norm, math.sqrt(25 + 169 + 289))
    assert [float(norm) for norm in result.group_norms] == pytest.approx([5, 13, 17])
    assert [float(coef) for coef in result.group_coefs] == pytest.approx([0.2, 1.0, 0.5])
    assert float(result.clipped_norm) == pytest.approx(math.sqrt(1 + 169 + 8.5**2), rel=1e-5)
    assert [local_of(one.grad).item() for one in made] == pytest.approx(
        here([0.6, 5.0, 4.0], [0.8, 12.0, 7.5])
    )


@pytest.mark.parametrize("norm_type", [0.0, 1.0, math.inf])
@on_ranks(2)
def test_groups_with_other_norms(norm_type):
    made = weights()
    groups = [{"params": made[:1]}, {"params": made[1:]}]
    result = counted(GradClipper(groups, 1e9, norm_type))
    expected = {0.0: [2, 4, 6], 1.0: [7, 40, 47], math.inf: [4, 15, 15]}[norm_type]
    assert [*map(float, result.group_norms), result.total_norm.item()] == pytest.approx(expected)


@on_ranks(2)
def test_a_non_finite_group_leaves_the_other_groups_alone():
    """Each group is clipped by its own norm, so one group's NaN is not another's."""
    made = [shard([math.nan, 1.0]), shard([3.0, 4.0])]
    groups = [{"params": [one], "max_norm": 1.0} for one in made]
    result = counted(GradClipper(groups, 1.0))
    assert math.isnan(float(result.group_norms[0]))
    assert float(result.group_norms[1]) == pytest.approx(5.0)
    assert not result.finite
    assert local_of(made[0].grad).isnan().all()
    assert local_of(made[1].grad).item() == pytest.approx(here(0.6, 0.8))


@on_ranks(2)
def test_propagate_names_this_ranks_own_parameters():
    pairs = [("a", shard([math.inf, 1.0])), ("b", shard([1.0, 1.0])), ("c", shard([1.0, math.nan]))]
    result = counted(GradClipper(pairs, 1.0))
    assert not result.finite
    assert not result.skipped
    assert list(result.nonfinite_parameters) == here(["a"], ["c"])


@on_ranks(2)
def test_a_finite_step_names_nobody():
    result = counted(GradClipper([("a", shard([3.0, 4.0]))], 1.0))
    assert result.finite
    assert list(result.nonfinite_parameters) == []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 1)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


def prescribed(mesh=None) -> Model:
    """Gradients whose norms are easy: 5; 3 and 4; 6 and 8. Plain without a mesh."""
    model = Model()
    values = {
        "embed.weight": F([[3.0], [4.0]]),
        "layers.0.weight": F([[3.0, 0.0], [0.0, 0.0]]),
        "layers.0.bias": F([0.0, 4.0]),
        "layers.1.weight": F([[0.0, 0.0], [6.0, 0.0]]),
        "layers.1.bias": F([8.0, 0.0]),
    }
    for name, value in values.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        grad = value if mesh is None else sharded(value, mesh, [S0])
        setattr(owner, name.rpartition(".")[2], parameter(grad))
    return model


PARAMETER_NORMS = {
    "embed.weight": 5.0,
    "layers.0.weight": 3.0,
    "layers.0.bias": 4.0,
    "layers.1.weight": 6.0,
    "layers.1.bias": 8.0,
}
MODULE_NORMS = {"embed": 5.0, "layers.0": 5.0, "layers.1": 10.0}
NORMS = pytest.mark.parametrize(
    ("norms", "expected"), [("parameter", PARAMETER_NORMS), ("module", MODULE_NORMS)]
)


@NORMS
@pytest.mark.parametrize("place", ["plain", "sharded"])
@on_ranks(2)
def test_norms_by_name(norms, expected, place):
    model = prescribed(None if place == "plain" else mesh_of(2))
    clipper = GradClipper(model, 1.0, norms=norms)
    for factor in (1.0, 1 / math.sqrt(150)):
        result = counted(clipper)
        assert_norm(result.total_norm, factor * math.sqrt(150), rtol=1e-5)
        assert {name: float(norm) for name, norm in result.norms.items()} == {
            name: pytest.approx(factor * norm, rel=1e-5) for name, norm in expected.items()
        }


@NORMS
@pytest.mark.parametrize("wrapper", ["compile", "DDP", "both"])
@on_ranks(2)
def test_names_are_without_wrappers_prefixes(norms, expected, wrapper):
    model = prescribed()
    wrapped = model if wrapper == "compile" else nn.parallel.DistributedDataParallel(model)
    wrapped = wrapped if wrapper == "DDP" else torch.compile(wrapped, backend="eager")
    assert not any(name in expected for name, _ in wrapped.named_parameters())
    assert GradClipper(wrapped, 1.0, norms=norms).clip_().norms.keys() == expected.keys()


@pytest.mark.parametrize(
    ("norm_type", "expected"), [(0.0, [2, 1]), (1.0, [7, 12]), (math.inf, [4, 12])]
)
@on_ranks(2)
def test_norms_of_other_powers(norm_type, expected):
    pairs = [("a", shard([3.0, 4.0])), ("b", shard([12.0, 0.0]))]
    result = counted(GradClipper(pairs, 1e9, norm_type, norms="parameter"))
    assert [float(result.norms[name]) for name in "ab"] == pytest.approx(expected)


@on_ranks(2)
def test_norms_without_names_have_group_and_position():
    groups = [{"params": weights()}, {"params": [shard([3.0, 4.0])]}]
    norms = GradClipper(groups, 1.0, norms="parameter").clip_().norms
    assert {name: round(float(norm), 4) for name, norm in norms.items()} == {
        "group0.0": 5.0,
        "group0.1": 13.0,
        "group0.2": 17.0,
        "group1.0": 5.0,
    }


@on_ranks(2)
def test_norms_agree_where_ranks_have_other_parameters():
    """Experts of which each rank has its own: the names are agreed on when it is built."""
    name = f"experts.{dist.get_rank()}"
    mine = parameter(F(here([3.0, 4.0], [5.0, 12.0])))
    pairs = [(name, mine), ("dense", parameter(F([8.0, 15.0])))]
    clipper = GradClipper(
        pairs,
        1e9,
        norms="parameter",
        layout=lambda one: (mesh_of(2), [S0]) if one is mine else None,
    )
    norms = {name: round(float(norm), 4) for name, norm in counted(clipper).norms.items()}
    assert norms == {"experts.0": 5.0, "experts.1": 13.0, "dense": 17.0}


@on_ranks(2)
def test_sums_travel_in_the_same_all_reduce():
    clipper = GradClipper([shard([3.0, 4.0])], 1.0, also=("loss", "tokens", "stop"))
    sizes = set()
    steps = [
        {"loss": F(1.5), "tokens": here(7, 11), "stop": 0.0},
        {"loss": F(0.25, dtype=torch.float64)},
        here({"stop": 1.0}, None),
        None,
    ]
    expected = [(3.0, 18.0, 0.0), (0.5, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0)]
    for also, sums in zip(steps, expected, strict=True):
        with count_collectives() as calls:
            result = clipper.clip_(also)
        assert_one_all_reduce(calls)
        sizes.add(calls[0].numel)
        assert tuple(float(result.sums[name]) for name in ("loss", "tokens", "stop")) == sums
    assert len(sizes) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@on_ranks(2)
def test_a_loss_that_is_not_finite_is_not_the_gradients_fault(bad):
    made = shard([3.0, 4.0])
    clipper = GradClipper([made], 1.0, also=("loss",), nonfinite="raise")
    result = counted(clipper, {"loss": here(bad, 1.0)})
    assert not math.isfinite(float(result.sums["loss"]))
    assert result.finite
    assert_norm(result.total_norm, 5.0)
    assert local_of(made.grad).item() == pytest.approx(here(0.6, 0.8))


@on_ranks(2)
def test_sums_come_back_from_a_skipped_step():
    made = shard([3.0, math.nan])
    clipper = GradClipper([made], 1.0, also=("loss",), nonfinite="skip")
    result = clipper.step(torch.optim.SGD([made], lr=1.0), also={"loss": 2.0})
    assert result.skipped
    assert float(result.sums["loss"]) == 4.0


@on_ranks(2)
def test_an_undeclared_sum_is_refused():
    clipper = GradClipper([shard([3.0, 4.0])], 1.0, also=("loss",))
    raised_everywhere(lambda: clipper.clip_({"losss": 1.0}), (ValueError, KeyError), "losss")
    assert_norm(clipper.clip_({"loss": 1.0}).total_norm, 5.0)


@on_ranks(2)
def test_gradients_that_are_kept_elsewhere():
    made = shard([100.0, 100.0])
    made.main_grad = sharded(F([3.0, 4.0]), mesh_of(2), [S0])
    result = counted(GradClipper([made], 1.0, grad=lambda one: one.main_grad))
    assert_norm(result.total_norm, 5.0)
    assert local_of(made.main_grad).item() == pytest.approx(here(0.6, 0.8))
    assert local_of(made.grad).item() == 100.0


@on_ranks(2)
def test_gradients_that_are_kept_elsewhere_in_another_dtype():
    made = nn.Parameter(F([1.0, 1.0]).bfloat16())
    made.main_grad = F([3.0, 4.0])
    clipper = GradClipper([("weight", made)], 1.0, grad=lambda one: one.main_grad)
    assert_norm(counted(clipper).total_norm, 5.0)
    torch.testing.assert_close(made.main_grad, F([0.6, 0.8]))


OPTIMIZERS = {
    "SGD": lambda one: torch.optim.SGD(one, lr=0.1, momentum=0.9),
    "AdamW": lambda one: torch.optim.AdamW(one, lr=0.1),
    "AdamW fused": lambda one: torch.optim.AdamW(one, lr=0.1, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2)
def test_steps_as_torch_does_on_the_unsharded_parameters(optimizer):
    """Four steps of which the second is below the threshold; zero_grad sets to None between."""
    grads = [torch.randn(6) * scale for scale in (3.0, 0.01, 2.0, 5.0)]
    whole = nn.Parameter(torch.ones(6))
    made = nn.Parameter(sharded(torch.ones(6), mesh_of(2), [S0]))
    theirs, ours = OPTIMIZERS[optimizer]([whole]), OPTIMIZERS[optimizer]([made])
    clipper = GradClipper([made], 1.0)
    clipped = []
    for grad in grads:
        whole.grad, made.grad = grad.clone(), sharded(grad, mesh_of(2), [S0])
        expected = nn.utils.clip_grad_norm_([whole], 1.0)
        theirs.step()
        result = clipper.step(ours)
        assert_norm(result.total_norm, expected.item())
        clipped.append(result.clipped)
        ours.zero_grad()
    assert clipped == [True, False, True, True]
    mine = slice(0, 3) if dist.get_rank() == 0 else slice(3, 6)
    torch.testing.assert_close(local_of(made.data), whole.data[mine], rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_max_norm_may_be_changed_between_steps():
    made = shard([3.0, 4.0])
    clipper = GradClipper([made], 10.0)
    assert not counted(clipper).clipped
    clipper.max_norm = 2.5
    assert counted(clipper).clip_coef.item() == pytest.approx(0.5)
    assert local_of(made.grad).item() == pytest.approx(here(1.5, 2.0))
    clipper.max_norm = None
    assert counted(clipper).clip_coef.item() == 1.0
    clipper.max_norm = 0.0
    counted(clipper)
    assert local_of(made.grad).item() == 0.0
    clipper.max_norm = -1.0
    with count_collectives() as calls, pytest.raises(ValueError, match="max_norm"):
        clipper.clip_()
    assert calls == []


@on_ranks(2)
def test_the_set_of_gradients_may_change_between_steps():
    """Some vanish, on one rank or on all, come back, turn plain; the payload stays."""
    sets = [
        (True, True, True),
        (True, False, True),
        here((True, True, True), (False, False, False)),
        (False, True, False),
        (False, False, True),
        (True, True, True),
    ]
    fulls = ([3.0, 4.0], [5.0, 12.0], [8.0, 15.0])
    made = weights()
    clipper = GradClipper(made, 1.0, norms="parameter")
    sizes = set()
    for present in sets:
        for one, full, there in zip(made, fulls, present, strict=True):
            one.grad = sharded(F(full), mesh_of(2), [S0]) if there else None
        mine = [full[dist.get_rank()] for full, there in zip(fulls, present, strict=True) if there]
        expected = math.hypot(*(value for values in everywhere(mine) for value in values))
        with count_collectives() as calls:
            result = clipper.clip_()
        assert_one_all_reduce(calls)
        sizes.add(calls[0].numel)
        assert_norm(result.total_norm, expected)
        now = [local_of(one.grad).item() for one in made if one.grad is not None]
        assert now == pytest.approx([value / expected for value in mine])
    assert len(sizes) == 1


@on_ranks(2)
def test_a_gradient_that_changes_its_layout_is_planned_anew():
    """Sharded, replicated, plain, in another dtype: what counts is what it is now."""
    made = nn.Parameter(sharded(torch.zeros(2), mesh_of(2), [S0]))
    clipper = GradClipper([made], 1e9, grad=lambda one: one.now)
    full = F([3.0, 4.0])
    for now in (
        sharded(full, mesh_of(2), [S0]),
        full,
        labelled(full, mesh_of(2), torch.distributed.tensor.Replicate()),
        full.double(),
        sharded(full, mesh_of(2), [S0]),
        sharded(full, mesh_of(1, 2), [S0, S0]),
    ):
        made.now = now
        norm = counted(clipper).total_norm
        assert_norm(norm, 5.0)
        assert norm.dtype == (torch.float64 if now.dtype == torch.float64 else torch.float32)


@on_ranks(2)
def test_a_result_stays_what_it_was():
    """Later steps, later gradients and reading late change nothing."""
    made = shard([3.0, 4.0])
    clipper = GradClipper([("w", made)], 1.0, norms="parameter", also=("loss",))
    first = clipper.clip_({"loss": 1.0})
    local_of(made.grad).fill_(50.0)
    second = clipper.clip_({"loss": 5.0})
    local_of(made.grad).zero_()
    assert first.total_norm.item() == pytest.approx(5.0)
    assert first.clip_coef.item() == pytest.approx(0.2)
    assert float(first.norms["w"]) == pytest.approx(5.0)
    assert float(first.sums["loss"]) == 2.0
    assert float(first.clipped_norm) == pytest.approx(1.0)
    assert second.total_norm.item() == pytest.approx(50 * math.sqrt(2))
    assert float(second.norms["w"]) == pytest.approx(50 * math.sqrt(2))


@on_ranks(2)
def test_non_finite_names_may_be_read_after_the_gradients_are_gone():
    made = shard([3.0, math.nan])
    result = GradClipper([("w", made)], 1.0).clip_()
    local_of(made.grad).zero_()
    assert list(result.nonfinite_parameters) == here([], ["w"])


@on_ranks(2)
def test_reading_a_result_never_communicates():
    clipper = GradClipper([("w", shard([math.nan, 4.0]))], 1.0, norms="parameter", also=("loss",))
    result = clipper.clip_()
    with count_collectives() as calls:
        names = "total_norm clip_coef clipped_norm clipped finite skipped nonfinite_parameters"
        for name in f"{names} norms group_norms group_coefs sums".split():
            getattr(result, name)
        result.as_dict()
        repr(result)
    assert calls == []


@on_ranks(2)
def test_a_result_as_plain_numbers_and_as_text():
    result = GradClipper([("w", shard([3.0, 4.0]))], 1.0, norms="parameter").clip_()
    plain = result.as_dict()
    assert all(type(value) is float for value in plain.values()), plain
    assert json.loads(json.dumps(plain)) == plain
    assert plain["total_norm"] == pytest.approx(5.0)
    assert plain["clip_coef"] == pytest.approx(0.2)
    assert "5" in repr(result)
    assert "0.2" in repr(result)


@on_ranks(2)
def test_total_norm_and_coefficient_are_plain_and_on_the_gradients_device():
    made = shard([3.0, 4.0])
    result = GradClipper([made], 1.0).clip_()
    for value in (result.total_norm, result.clip_coef):
        assert type(value) is torch.Tensor
        assert value.shape == ()
        assert value.device == local_of(made.grad).device
    assert isinstance(result, ClipResult)


@on_ranks(4)
def test_a_clipper_of_some_ranks_is_built_by_those():
    group = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        made = parameter(F([3.0, 4.0]))
        clipper = GradClipper([("w", made)], 1.0, group=group)
        with count_collectives() as calls:
            norms = [clipper.clip_().total_norm.item() for _ in range(2)]
        assert [call.op for call in calls] == ["all_reduce"] * 2
        assert norms == pytest.approx([5.0, 1.0], rel=1e-5)
    dist.barrier()


@on_ranks(4)
def test_norms_have_the_same_bits_on_every_rank_for_many_steps():
    made = [parameter(sharded(torch.randn(7, 3), mesh_of(4), [S0])) for _ in range(5)]
    made += [parameter(sharded(torch.randn(6), mesh_of(2, 2), [S0, S0])) for _ in range(5)]
    clipper = GradClipper(made, 0.7)
    values = []
    for step in range(5):
        for one in made:
            local_of(one.grad).mul_(1 + step)
        result = counted(clipper)
        values.append((result.total_norm.item().hex(), result.clip_coef.item().hex()))
    assert all(other == values for other in everywhere(values))
    assert all(one != other for one, other in pairwise(values))
