"""Parameters that a clipper was not built with: nothing is counted or stepped behind its back."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from shardclip import GradClipper, clip_grad_norm_, clip_grad_value_
from shardclip.clipping.agc import AdaptiveGradClipper
from shardclip.clipping.per_tensor import PerTensorClipper
from tests.ranks import on_ranks, raised_everywhere
from tests.ranks.clippers import counted, shard
from tests.ranks.models import average_, loss_of, mlp
from tests.ranks.tensors import exact_norm, local_of, mesh_of
from tests.ranks.unsharded import assert_norm
from tests.ranks.warned import recorded

ANEW = "build the GradClipper anew"


class _Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it, as peft has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


class _Shifted(nn.Module):
    def forward(self, weight):
        return weight + 1


def _add_a_layer(model):
    model.append(nn.Linear(2, 2))
    return "4.weight"


def _add_below(model):
    model[1].append(nn.Linear(7, 7))
    return "1.2.weight"


def _add_a_parameter(model):
    model[1][1].scale = nn.Parameter(torch.ones(()))
    model[1][1].register_forward_hook(lambda module, _, out: out * module.scale)
    return "1.1.scale"


def _replace_the_head(model):
    model[3] = nn.Linear(7, 2)
    return "3.weight"


def _adapt(model):
    model[0] = _Adapted(model[0])
    return "0.lora_A.weight"


def _assign(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return "0.weight"


def _to_empty(model):
    model.to_empty(device="cpu")
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(0.5)
    return "0.weight"


def _weight_norm(model):
    with recorded():  # it is deprecated
        nn.utils.weight_norm(model[3])
    return "3.weight_[gv]"


def _parametrize(model):
    parametrizations.weight_norm(model[3])
    return r"3.parametrizations.weight.original\d"


CHANGES = {
    change.__name__.strip("_"): change
    for change in (
        _add_a_layer,
        _add_below,
        _add_a_parameter,
        _replace_the_head,
        _adapt,
        _assign,
        _to_empty,
        _weight_norm,
        _parametrize,
    )
}
CHANGED = pytest.mark.parametrize("change", CHANGES)
STEPPED = pytest.mark.parametrize("stepped", [False, True])


def _backward(model, synchronise=average_):
    model.zero_grad()
    loss_of(model, dist.get_rank() if dist.is_initialized() else 0).mul(100).backward()
    for one in model.parameters():
        if one.grad is not None and synchronise is not None:
            synchronise(one.grad)


def _gradients(model):
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def _assert_refused(model, call, *patterns):
    """Refused on every rank, and no gradient or weight is touched."""
    before, weights = _gradients(model), [one.detach().clone() for one in model.parameters()]
    text = raised_everywhere(call, ValueError, ANEW, *patterns)
    assert all(map(torch.equal, _gradients(model), before))
    assert all(map(torch.equal, model.parameters(), weights))
    return text


def _check(change, stepped):
    model = mlp()
    if change == "to_empty":
        model = model.to("meta")
    clipper = GradClipper(model, 0.1)
    if change != "to_empty":
        _backward(model)
        expected = exact_norm(_gradients(model))
        assert_norm(clipper.clip_().total_norm, expected)
    name = CHANGES[change](model)
    _backward(model)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    call = (lambda: clipper.step(optimizer)) if stepped else clipper.clip_
    for _ in range(2):  # not only in the first step
        _assert_refused(model, call, f"{name}: it has a gradient", "rank 0")
    expected = exact_norm(_gradients(model))
    again = GradClipper(model, 0.1)
    assert_norm((again.step(optimizer) if stepped else again.clip_()).total_norm, expected)
    assert exact_norm(_gradients(model)) == pytest.approx(0.1, rel=1e-3)


@CHANGED
@STEPPED
@on_ranks(1)
def test_on_one_rank_what_changes_later_is_refused_by_name(change, stepped):
    _check(change, stepped)


@CHANGED
@STEPPED
@on_ranks(2)
def test_what_changes_later_is_refused_by_name(change, stepped):
    _check(change, stepped)


@STEPPED
@on_ranks(4)
def test_on_four_ranks_what_changes_later_is_refused_by_name(stepped):
    _check("replace_the_head", stepped)


@pytest.mark.parametrize("odd", [0, 3])
@STEPPED
@on_ranks(4)
def test_a_stray_on_one_rank_alone_raises_on_all_and_the_clipper_stays_usable(odd, stepped):
    model = mlp()
    clipper = GradClipper(model, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    extra = nn.Parameter(torch.ones(3))
    if dist.get_rank() == odd:
        model[0].register_parameter("extra", extra)
        optimizer.add_param_group({"params": [extra]})
    call = (lambda: clipper.step(optimizer)) if stepped else clipper.clip_
    for strays in (False, True, False):  # a parameter without a gradient is no matter
        _backward(model, None)
        for one in model.parameters():
            if one is not extra:
                average_(one.grad)
        expected = exact_norm(_gradients(model))
        extra.grad = torch.ones(3) if strays and dist.get_rank() == odd else None
        if strays:
            text = _assert_refused(model, call, rf"0\.extra: it has a gradient.*rank {odd}")
            assert text.count("rank ") == 1
            continue
        assert_norm(call().total_norm, expected)


def _refuse_after(model, change, name):
    clippers = GradClipper(model, 0.1), AdaptiveGradClipper(model), PerTensorClipper(model, 0.1)
    change()
    model.zero_grad()
    loss_of(model, dist.get_rank()).backward()
    for clipper in clippers:
        _assert_refused(model, clipper.clip_, f"{name}: it has a gradient")


@on_ranks(2)
def test_built_before_fully_shard():
    model = mlp()
    _refuse_after(model, lambda: fully_shard(model, mesh=mesh_of(2)), "0.weight")


@on_ranks(2)
def test_built_before_parallelize_module():
    model = mlp()
    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    _refuse_after(model, lambda: parallelize_module(model, mesh_of(2), plan), "0.weight")


@pytest.mark.parametrize("original", [True, False])
@on_ranks(2)
def test_built_before_fsdp1(original):
    model = mlp()
    clipper = GradClipper(model, 0.1)
    sharded = FullyShardedDataParallel(
        model, use_orig_params=original, device_id=torch.device("cpu")
    )
    loss_of(sharded, dist.get_rank()).backward()
    raised_everywhere(clipper.clip_, ValueError, "FSDP1" if original else f"flat_param.*{ANEW}")


@on_ranks(2)
def test_an_adapter_after_fully_shard():
    model = mlp()
    fully_shard(model[1], mesh=mesh_of(2))
    fully_shard(model, mesh=mesh_of(2))
    _refuse_after(model, lambda: _adapt(model), "0.lora_A.weight")


@on_ranks(2)
@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_a_plain_head_of_the_same_name_in_a_sharded_model(root, used):
    """It is none of the whole parameters that FSDP2 holds for a while, though named like one."""
    model = mlp()
    fully_shard(model[3], mesh=mesh_of(2))
    if root:
        fully_shard(model, mesh=mesh_of(2))
    if used:
        loss_of(model, dist.get_rank()).backward()
        model.zero_grad()

    def replace_head():
        model[3] = nn.Linear(7, 2)

    _refuse_after(model, replace_head, "3.weight")


@on_ranks(2)
def test_a_sharded_model_materialized():
    """torch swaps DTensors' contents, so that the clipper knows them; else they are refused."""
    with torch.device("meta"):
        model = mlp()
    fully_shard(model, mesh=mesh_of(2))
    clipper, known = GradClipper(model, 0.1), set(map(id, model.parameters()))
    _to_empty(model)
    for place, one in enumerate(model.parameters()):
        local_of(one.data).normal_(generator=torch.Generator().manual_seed(place))
    loss_of(model, dist.get_rank()).mul(100).backward()
    if known != set(map(id, model.parameters())):
        _assert_refused(model, clipper.clip_, "0.weight: it has a gradient")
        return
    expected = exact_norm([one.grad.full_tensor() for one in model.parameters()])
    assert expected > 0.1
    assert_norm(counted(clipper).total_norm, expected)


@on_ranks(2)
def test_a_sharded_model_loaded_by_assignment():
    model = mlp()
    fully_shard(model, mesh=mesh_of(2))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    _refuse_after(model, lambda: model.load_state_dict(state, assign=True), "0.weight")


@on_ranks(2)
def test_built_between_forward_and_backward_of_fsdp2():
    model = mlp()
    fully_shard(model, mesh=mesh_of(2))
    loss = loss_of(model, dist.get_rank())  # the root's parameters lie unsharded now
    clipper = GradClipper(model, 0.1)
    loss.backward()
    _assert_refused(model, clipper.clip_, "0.weight: it has a gradient")


@pytest.mark.parametrize("part", ["all", "below"])
@on_ranks(2)
def test_what_fsdp2_holds_unsharded_for_a_while_is_no_stray(part):
    model = mlp()
    fully_shard(model, mesh=mesh_of(2))
    given = model if part == "all" else model[1]
    clipper = GradClipper(given, 0.1)
    model.set_reshard_after_backward(False)
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        loss_of(model, dist.get_rank()).backward()
        assert not any(isinstance(one, DTensor) for one in given.parameters())
        assert all(one.grad is not None for one in given.parameters())
        with recorded():  # that there is no gradient
            assert_norm(counted(clipper).total_norm, 0.0)
        model.set_requires_gradient_sync(True)
        loss_of(model, dist.get_rank()).backward()
        model.reshard()
        expected = exact_norm([one.grad.full_tensor() for one in given.parameters()])
        assert expected > 0.1
        assert_norm(counted(clipper).total_norm, expected)
        model.zero_grad()


@on_ranks(2)
def test_a_head_replaced_below_ddp():
    model = DistributedDataParallel(mlp())
    clipper = GradClipper(model, 0.1)
    _backward(model, None)
    counted(clipper)
    _replace_the_head(model.module)
    _backward(model)
    _assert_refused(model, clipper.clip_, r" 3\.weight: it has a gradient.*one of 2 such")


@on_ranks(2)
def test_wrappers_around_known_parameters_are_no_matter():
    model = mlp()
    clipper = GradClipper(model, 0.1)
    model[1] = checkpoint_wrapper(model[1])
    model[0] = torch.compile(model[0], backend="eager")
    model[3].other = model[0]  # tied
    model.append(nn.Linear(2, 2).requires_grad_(False))
    _backward(DistributedDataParallel(model), None)
    expected = exact_norm(_gradients(model))
    assert_norm(counted(clipper).total_norm, expected)


@on_ranks(1)
def test_a_module_made_for_the_clipper_alone_is_watched():
    first, second = mlp(), mlp()
    clipper = GradClipper(nn.ModuleList([first, second]), 0.1)
    _replace_the_head(second)
    _backward(first)
    clipper.clip_()
    _backward(second)
    _assert_refused(second, clipper.clip_, r"1\.3\.weight: it has a gradient")


@on_ranks(1)
def test_an_unchanged_module_is_not_looked_through():
    model = mlp()
    clipper = GradClipper(model, 0.1)
    _backward(model)
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(nn.Module, "named_parameters", None)
        patched.setattr(nn.Module, "modules", None)
        for _ in range(2):
            clipper.clip_()


# Without a module only the optimizer can tell.


def _listed(given, model):
    if given == "list":
        return list(model.parameters())
    if given == "groups":
        return [{"params": model[0].parameters()}, {"params": model[1:].parameters()}]
    return model[:3]


@pytest.mark.parametrize("given", ["list", "groups", "part"])
@pytest.mark.parametrize("named", [False, True])
@on_ranks(2)
def test_an_optimizer_with_a_gradient_that_is_not_counted(given, named):
    model = mlp()
    clipper = GradClipper(_listed(given, model), 0.1)
    model[3] = nn.Linear(7, 2)
    _backward(model)
    held = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.SGD(held, 1.0)
    name = "3.weight" if named else r"SGD.param_groups\[0\]\['params'\]\[6\], of shape \(2, 7\)"
    _assert_refused(model, lambda: clipper.step(optimizer), name, "one of 2", "max_norm=None")


@on_ranks(2)
def test_the_mend_counts_a_head_and_leaves_it_alone():
    model = mlp()
    free = {"params": model[3].parameters(), "max_norm": None}
    clipper = GradClipper([{"params": model[:3].parameters()}, free], 0.1)
    _backward(model)
    expected = exact_norm(_gradients(model))
    head = _gradients(model[3])
    result = clipper.step(torch.optim.SGD(model.parameters(), 0.0))
    assert_norm(result.total_norm, expected)
    assert all(map(torch.equal, _gradients(model[3]), head))


@on_ranks(2)
def test_an_optimizer_over_a_part_is_one_of_several():
    model = mlp()
    clipper = GradClipper(model, 0.1)
    _backward(model)
    optimizers = [torch.optim.SGD(part.parameters(), 1.0) for part in (model[0], model[1:])]
    before = [one.detach().clone() for one in model.parameters()]
    for optimizer in optimizers:
        clipper.step(optimizer)
    assert not any(map(torch.equal, model.parameters(), before))
    model.zero_grad()
    model[0](torch.ones(1, 3)).sum().backward()  # this time the second has nothing to do
    clipper.step(optimizers)


@pytest.mark.parametrize("odd", [None, 1])
@on_ranks(2)
def test_an_optimizer_built_before_fully_shard(odd):
    model = mlp()
    stale = torch.optim.SGD(model.parameters(), 1.0)
    fully_shard(model, mesh=mesh_of(2))
    clipper = GradClipper(model, 0.1)
    loss_of(model, dist.get_rank()).backward()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    if odd in (None, dist.get_rank()):
        optimizer = stale
    before = [local_of(one).detach().clone() for one in model.parameters()]
    who = "rank 0.*rank 1" if odd is None else f"rank {odd}"
    raised_everywhere(
        lambda: clipper.step(optimizer), ValueError, r"0\.weight: .*would move nothing", who
    )
    assert all(map(torch.equal, map(local_of, model.parameters()), before))


@on_ranks(2)
def test_an_optimizer_of_another_model():
    model, other = mlp(), mlp()
    clipper = GradClipper(model, 0.1)
    _backward(model)
    ours, foreign = (torch.optim.SGD(one.parameters(), 1.0) for one in (model, other))
    raised_everywhere(lambda: clipper.step(foreign), ValueError, "would move nothing")
    clipper.step([ours, foreign])  # no gradient is left over: another loop's, perhaps
    _backward(other)
    _assert_refused(other, lambda: clipper.step(foreign), "params")


class _Masters(torch.optim.Optimizer):
    """Steps on copies of its own, as optimizers for 16-bit parameters do."""

    def __init__(self, parameters) -> None:
        self.theirs = list(parameters)
        super().__init__([one.detach().double() for one in self.theirs], {})

    def step(self):
        for group in self.param_groups:
            for master, theirs in zip(group["params"], self.theirs, strict=True):
                master.sub_(theirs.grad)
                theirs.data.copy_(master)


@on_ranks(2)
def test_an_optimizer_that_may_keep_copies_is_only_warned_of():
    model = mlp()
    clipper = GradClipper(model, 0.1)
    optimizer = _Masters(model.parameters())
    for times in (1, 0):
        before = [one.detach().clone() for one in model.parameters()]
        _backward(model)
        with recorded() as messages:
            clipper.step(optimizer)
        assert sum("_Masters holds none" in message for message in messages) == times
        assert not any(map(torch.equal, model.parameters(), before))


@on_ranks(2)
def test_with_grad_a_master_gradient_in_the_same_memory_is_counted():
    made = [nn.Parameter(torch.zeros(3).bfloat16()) for _ in range(2)]
    flat = torch.arange(6.0)
    mains = dict(zip(made, flat.split(3), strict=True))
    masters = [nn.Parameter(torch.zeros(3)) for _ in made]
    for master, main in zip(masters, flat.view(2, 3), strict=True):
        master.grad = main
    clipper = GradClipper(zip("ab", made, strict=True), 1.0, grad=mains.get)
    optimizer = torch.optim.SGD(masters, 1.0)
    assert_norm(clipper.step(optimizer).total_norm, 55**0.5)
    assert_norm(torch.cat([one.detach() for one in masters]).norm(), 1.0)
    masters[0].grad = torch.ones(3)
    raised_everywhere(lambda: clipper.step(optimizer), ValueError, ANEW)


# Gradients in place of parameters, and nothing at all.


@pytest.mark.parametrize("odd", [None, 1])
@on_ranks(2)
def test_gradients_given_to_a_clipper(odd):
    held = shard([3.0, 4.0])
    given = held.grad if odd in (None, dist.get_rank()) else held
    clipper = GradClipper([("w", given)], 1.0)
    for _ in range(2):
        raised_everywhere(clipper.clip_, TypeError, "w is no parameter.*Were gradients given")
    assert local_of(held.grad).tolist() == [3.0 + dist.get_rank()]


@pytest.mark.parametrize("odd", [None, 1])
@on_ranks(2)
def test_gradients_given_to_a_function(odd):
    held = nn.Parameter(torch.zeros(2))
    held.grad = torch.tensor([3.0, 4.0])
    given = [held.grad] if odd in (None, dist.get_rank()) else [held]
    for _ in range(3):
        raised_everywhere(
            lambda: clip_grad_norm_(given, 1.0), TypeError, r"parameters\[0\] is no parameter"
        )
    assert held.grad.tolist() == [3.0, 4.0]
    with pytest.raises(TypeError, match="Were gradients given"):
        clip_grad_value_([held.grad], 1.0)
    assert_norm(clip_grad_norm_([held], 1.0), 5.0)


@on_ranks(2)
def test_tensors_that_may_get_a_gradient_are_none():
    leaf = torch.ones(2, requires_grad=True)
    inner = leaf * 2
    inner.retain_grad()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    for given in (leaf, inner, frozen):
        with recorded() as messages:
            counted(GradClipper([("w", given)], 1.0))
        assert "no gradient on any rank" in messages[0]
    plain = torch.ones(2)
    plain.grad = torch.tensor([3.0, 4.0])
    assert_norm(counted(GradClipper([("w", plain)], 1.0)).total_norm, 5.0)


@on_ranks(2)
def test_no_gradient_is_said_again_while_there_never_was_one():
    model = mlp()
    clipper = GradClipper([*model.named_parameters()], 1.0)
    fully_shard(model, mesh=mesh_of(2))  # a list does not tell that its parameters are out of use
    told = []
    for _ in range(11):
        loss_of(model, dist.get_rank()).backward()
        with recorded() as messages:
            counted(clipper)
        told.append(sum("no gradient on any rank" in message for message in messages))
    assert told == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    raised_everywhere(lambda: clipper.step(optimizer), ValueError, ANEW)


@on_ranks(2)
def test_no_gradient_for_once_is_said_once():
    held = shard([3.0, 4.0])
    clipper = GradClipper([("w", held)], 10.0)
    counted(clipper)
    held.grad = None
    told = []
    for _ in range(4):
        with recorded() as messages:
            counted(clipper)
        told.append(len(messages))
    assert told == [1, 0, 0, 0]
