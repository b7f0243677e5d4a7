"""What is wrong on one rank alone, in whatever way, is everyone's error; nobody hangs."""

import gc
import math
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from shardclip import (
    GradClipper,
    ReplicaMismatchError,
    clip_grad_norm_,
    clip_grads_with_norm_,
    get_total_norm,
    global_norm,
)
from tests.ranks import everywhere, on_ranks, raised_everywhere
from tests.ranks.tensors import S0, labelled, local_of, mesh_of, mesh_over, parameter, sharded
from tests.ranks.warned import recorded

F = torch.tensor
R = Replicate()


def made(value: float = 3.0) -> torch.nn.Parameter:
    return parameter(sharded(F([value, 4.0]), mesh_of(2), [S0]))


@on_ranks(2)
def test_a_number_that_a_rank_does_not_have_counts_zero():
    clipper = GradClipper([("w", made())], 1.0, also=("loss",))
    loss = torch.tensor(2.0) if dist.get_rank() else None
    assert clipper.clip_(also={"loss": loss}).sums == {"loss": 2.0}


@pytest.mark.parametrize("wrong", ["shape", "name", "type"])
@on_ranks(2)
def test_a_wrong_number_on_one_rank(wrong):
    clipper = GradClipper([("w", made())], 1.0, also=("loss",))
    bad = {"shape": {"loss": torch.ones(1)}, "name": {"los": 1.0}, "type": {"loss": "much"}}[wrong]
    also = bad if dist.get_rank() else {"loss": 1.0}
    raised_everywhere(lambda: clipper.clip_(also=also), (ValueError, TypeError), r"rank 1")
    assert clipper.clip_(also={"loss": 1.0}).sums == {"loss": 2.0}


@on_ranks(2)
def test_a_grad_callable_that_raises_on_one_rank():
    one = made()

    def read(parameter):
        return parameter.main_grad if dist.get_rank() else parameter.grad

    clipper = GradClipper([("w", one)], 1.0, grad=read)
    raised_everywhere(clipper.clip_, ValueError, "main_grad", "rank 1")


@on_ranks(2)
def test_a_param_group_that_is_wrong_on_one_rank():
    groups = [{"params": [made()]}] if dist.get_rank() else [{"parameters": [made()]}]
    raised_everywhere(lambda: GradClipper(groups, 1.0), ValueError, "'params'", "rank 0")


@pytest.mark.parametrize(
    "setting",
    [
        ({"norms": "parameter"}, {}),
        ({"also": ("a",)}, {"also": ("a", "b")}),
        ({"nonfinite": "raise"}, {"nonfinite": "skip"}),
        ({"norm_type": 2.0}, {"norm_type": math.inf}),
    ],
    ids=lambda s: next(iter(s[0])),
)
@on_ranks(2)
def test_settings_that_differ_between_ranks_are_refused_when_the_clipper_is_built(setting):
    mine = setting[dist.get_rank()]
    name = next(iter(setting[0]))
    raised_everywhere(
        lambda: GradClipper([("w", made())], 1.0, **mine), ValueError, name, "rank 0", "rank 1"
    )


@pytest.mark.parametrize("clip", ["function", "clipper"])
@on_ranks(2)
def test_a_warning_that_is_an_error_comes_when_all_ranks_are_through(clip):
    """Rank 0 alone warns: its parameters come from a used-up iterator."""
    parameters = iter(()) if dist.get_rank() == 0 else iter([made()])
    outcome = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            if clip == "function":
                clip_grad_norm_(parameters, 1.0)
            else:
                GradClipper(parameters, 1.0)
        except UserWarning as warning:
            outcome = str(warning)
    told = everywhere(outcome)
    assert "empty iterator" in told[0]
    assert told[1] is None


@on_ranks(2)
def test_memory_that_elements_share_is_refused_before_anything_is_scaled():
    fine = made()
    other = parameter(torch.ones(4))
    if dist.get_rank() == 0:
        other.grad = torch.ones(1).expand(4)
    before = local_of(fine.grad).clone()
    raised_everywhere(
        lambda: clip_grad_norm_([fine, other], 0.1), ValueError, "share memory", "rank 0"
    )
    assert local_of(fine.grad).equal(before)


@on_ranks(4)
def test_a_layout_whose_mesh_lacks_a_rank_that_has_the_tensor():
    pair = mesh_over(0, 1)
    one = parameter(F([3.0, 4.0]))
    raised_everywhere(
        lambda: clip_grad_norm_([one], 1.0, layout=lambda p: (pair, (R,))),
        ValueError,
        "rank 2",
        "not on",
    )


@pytest.mark.parametrize("fault", ["swapped", "opposite"])
@on_ranks(4)
def test_pieces_that_are_swapped_or_off_by_opposite_errors_in_one_replica(fault):
    """HSDP: ranks 2 and 3 hold a second copy of both shards, but not where they should."""
    torch.manual_seed(0)
    full = torch.randn(512)
    first, second = full.chunk(2)
    rank = dist.get_rank()
    pieces = {"swapped": [first, second, second, first]}.get(
        fault, [first, second, first + 0.5, second - 0.5]
    )
    grad = labelled(pieces[rank].clone(), mesh_of(2, 2), R, Shard(0))
    raised_everywhere(lambda: get_total_norm([grad]), ReplicaMismatchError)


@on_ranks(2)
def test_complex_copies_with_real_and_imaginary_parts_exchanged():
    value = F([1 + 2j, 3 + 4j]) if dist.get_rank() else F([2 + 1j, 4 + 3j])
    raised_everywhere(lambda: get_total_norm([value]), ReplicaMismatchError)


@on_ranks(4)
def test_none_entries_keep_the_places_of_a_list():
    piece = sharded(F([3.0, 0.0, 0.0, 0.0]), mesh_of(4), [S0])
    copy = labelled(F([4.0]), mesh_of(4), R)
    first = None if dist.get_rank() == 3 else piece
    assert float(global_norm([first, copy])) == 5


@on_ranks(4)
def test_module_norms_of_stages_that_share_a_modules_name():
    """Stage 0 has one parameter in `layers.0`, stage 1 two, one of them of the same name."""
    mesh = mesh_of(2, 2, names=("pp", "dp"))["dp"]
    if dist.get_rank() < 2:
        named = [("layers.0.weight", parameter(labelled(F([3.0]), mesh, R)))]
    else:
        named = [
            ("layers.0.weight", parameter(labelled(F([[4.0]]), mesh, R))),
            ("layers.0.bias", parameter(labelled(F([12.0]), mesh, R))),
        ]
    norms = GradClipper(named, 1.0, norms="module").clip_().norms
    assert norms == pytest.approx({"layers.0": 3.0, "layers.0@pp1": math.sqrt(160)})


@on_ranks(4)
def test_names_are_those_of_ranks_that_hold_something():
    held = sharded(F([3.0, 4.0]), mesh_over(0, 1), [S0]) if dist.get_rank() < 2 else None
    grad = held if held is not None else labelled(torch.empty(0), mesh_over(0, 1), S0)
    clipper = GradClipper([("a.w", parameter(grad))], 1.0, norms="parameter")
    with recorded():  # that the mesh does not span the group
        assert clipper.clip_().norms == {"a.w": 5.0}


@on_ranks(2)
def test_a_result_keeps_no_gradient_alive():
    one = parameter(torch.ones(1000))
    clipper = GradClipper([("w", one)], 1.0)
    result = clipper.clip_()
    alive = weakref.ref(one.grad)
    one.grad = None
    gc.collect()
    assert alive() is None
    assert result.clipped


def test_gradients_with_a_graph_are_no_parameters():
    leaf = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
    with (
        pytest.warns(UserWarning, match="not a leaf"),
        pytest.raises(TypeError, match="no parameter"),
    ):
        clip_grads_with_norm_([grad], 1.0, 5.0)


def test_nothing_is_scaled_where_one_gradient_cannot_be():
    fine, integer = parameter(torch.ones(2)), torch.zeros(2)
    integer.grad = None
    odd = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    odd.grad = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"parameters\[1\].*int64"):
        clip_grads_with_norm_([fine, odd], 1.0, 5.0)
    assert fine.grad.tolist() == [1.0, 1.0]
