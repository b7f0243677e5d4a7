"""optax-style trees of tensors: clip_by_global_norm keeps their structure."""

from collections import OrderedDict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardclip import clip_by_global_norm, global_norm
from tests.ranks import count_collectives, on_ranks
from tests.ranks.tensors import S0, exact_norm, local_of, mesh_of, sharded
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce

Layer = namedtuple("Layer", ["kernel", "bias"])


def tree_of(*leaves):
    a, b, c, d = leaves
    return {
        "layer": Layer(a, (b, None)),
        "head": [c, {}],
        "extra": OrderedDict(scale=d),
        "frozen": None,
    }


def leaves_of(tree):
    return [
        tree["layer"].kernel,
        tree["layer"].bias[0],
        tree["head"][0],
        tree["extra"]["scale"],
    ]


@on_ranks(2)
def test_a_tree_keeps_its_structure_and_types():
    fulls = [torch.randn(4, 3), torch.randn(4), torch.randn(6, 2), torch.randn(1)]
    mesh = mesh_of(2)
    given = [sharded(fulls[0], mesh, [S0]), fulls[1], sharded(fulls[2], mesh, [S0]), fulls[3]]
    total = exact_norm(fulls)
    with count_collectives() as calls:
        clipped, norm = clip_by_global_norm(tree_of(*given), total / 4)
    assert_one_all_reduce(calls)
    assert_norm(norm, total)
    assert list(clipped) == ["layer", "head", "extra", "frozen"]
    assert type(clipped["layer"]) is Layer
    assert type(clipped["layer"].bias) is tuple
    assert clipped["layer"].bias[1] is None
    assert type(clipped["head"]) is list
    assert clipped["head"][1] == {}
    assert type(clipped["extra"]) is OrderedDict
    assert clipped["frozen"] is None
    for before, after in zip(given, leaves_of(clipped), strict=True):
        assert type(after) is type(before)
        torch.testing.assert_close(local_of(after), local_of(before) / 4, rtol=1e-5, atol=0)
    assert isinstance(clipped["layer"].kernel, DTensor)
    assert_norm(global_norm(tree_of(*given)), total)


def test_a_frozen_mapping_stays_one():
    tree = MappingProxyType({"b": torch.tensor([3.0]), "a": {"c": torch.tensor([4.0])}})
    clipped, norm = clip_by_global_norm(tree, 1.0)
    assert norm == 5
    assert type(clipped) is MappingProxyType
    assert list(clipped) == ["b", "a"]
    torch.testing.assert_close(clipped["b"], torch.tensor([0.6]))
    torch.testing.assert_close(clipped["a"]["c"], torch.tensor([0.8]))


@on_ranks(2)
def test_keys_in_another_order_are_the_same_leaves():
    """Copies are told by their keys, not by the order of insertion."""
    a, b = torch.randn(5), torch.randn(5)
    tree = {"a": a, "b": b} if torch.distributed.get_rank() else {"b": b, "a": a}
    clipped, norm = clip_by_global_norm(tree, 1e-3)
    assert_norm(norm, exact_norm([a, b]))
    assert list(clipped) == list(tree)


def test_a_list_gives_a_list_and_a_tuple_a_tuple():
    tensors = [torch.tensor([3.0]), None, torch.tensor([4.0])]
    for kind in (list, tuple):
        clipped, norm = clip_by_global_norm(kind(tensors), 1.0)
        assert type(clipped) is kind
        assert norm == 5
        assert clipped[0].item() == pytest.approx(0.6)
        assert clipped[1] is None


def test_what_is_given_stays_as_it_is():
    tree = {"a": {"b": torch.tensor([3.0, 4.0])}}
    clipped, _ = clip_by_global_norm(tree, 1.0)
    assert tree["a"]["b"].tolist() == [3, 4]
    assert clipped["a"]["b"].tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("wrong", [torch.ones(2), 1.0, "ab", None])
def test_a_leaf_alone_is_rejected(wrong):
    for call in (lambda: clip_by_global_norm(wrong, 1.0), lambda: global_norm(wrong)):
        with pytest.raises(TypeError, match=f"sequence of tensors, got {type(wrong).__name__}"):
            call()


@on_ranks(2)
def test_a_leaf_that_is_no_tensor_is_named():
    with pytest.raises(TypeError, match=r"t_list\['a'\]\[1\]: is a int"):
        clip_by_global_norm({"a": [torch.ones(1), 3]}, 1.0)
