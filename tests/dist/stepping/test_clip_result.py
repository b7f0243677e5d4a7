"""ClipResult: norms by name, what was not finite, and that a result stays what it was."""

import json
import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardclip import ClipResult, GradClipper
from tests.ranks import count_collectives, everywhere, on_ranks
from tests.ranks.clippers import counted, here, shard, weights
from tests.ranks.tensors import S0, local_of, mesh_of, parameter, sharded
from tests.ranks.unsharded import assert_norm

F = torch.tensor


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
