"""overlap=True: whatever changes a gradient after its hook is seen, version counter or not."""

import ctypes
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardclip import GradClipper, clip_grad_norm_
from shardclip.step import overlap
from tests.ranks import on_ranks
from tests.ranks.tensors import exact_norm, local_of, mesh_of

FAR = 1e9


def foreach(name, *arguments):
    """An in-place operator of torch's on a list, which moves no version of a DTensor."""
    return lambda grads: getattr(torch, f"_foreach_{name}_")(grads, *arguments)


def unscaled(grads):
    found, inverse = torch.zeros(1), torch.full((1,), 0.25)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)


def each(change):
    """The same change of every gradient."""

    def change_all(grads):
        for grad in grads:
            change(grad)

    return change_all


def in_numpy(local):
    local.numpy()[...] *= 3


def in_memory(local):
    other = torch.full_like(local, 2.0)
    ctypes.memmove(local.data_ptr(), other.data_ptr(), local.nbytes)


def storage_filled(local):
    local.untyped_storage().fill_(0)


def row_masked(local):
    local.data[: 1 + local.shape[0] // 100] = 7.0


def one_element(local):
    local.data.view(-1)[-1] = 50.0


def halves_swapped_and_scaled(local):
    flat = local.data.view(-1)
    flat.copy_(torch.cat([flat[flat.numel() // 2 :] * 3, flat[: flat.numel() // 2]]))


def set_to_another(local):
    local.set_(torch.full_like(local, 3.0))


def ravelled_view(local):
    local.detach().view(-1)[0] = 30.0


def in_inference_mode(local):
    with torch.inference_mode():
        local.data.mul_(3)


def compiled(local):
    torch.compile(lambda t: t.mul_(3), backend="eager")(local.data)


ON_LISTS = {
    "mul": foreach("mul", 3.0),
    "mul by a tensor": foreach("mul", torch.tensor(3.0)),
    "div": foreach("div", 4.0),
    "add": foreach("add", 1.0),
    "sub": foreach("sub", 1.0),
    "zero": foreach("zero"),
    "neg and mul": lambda grads: (foreach("neg")(grads), foreach("mul", 2.0)(grads)),
    "torch's clip_grad_norm_": None,
    "torch's clip_grads_with_norm_": None,
    "torch's clip_grad_value_": None,
    "GradScaler": None,
}
ON_LOCALS = {
    "unscale_": unscaled,
    "clamp_min": foreach("clamp_min", 0.05),
    "clamp_max": foreach("clamp_max", 0.05),
    "copy": lambda locals_: torch._foreach_copy_(locals_, [torch.ones_like(t) for t in locals_]),
    "lerp": lambda ts: torch._foreach_lerp_(ts, [torch.ones_like(t) for t in ts], 0.5),
    "addcmul": lambda ts: torch._foreach_addcmul_(ts, [t * 2 for t in ts], [t + 1 for t in ts]),
    "sqrt of abs": lambda ts: (torch._foreach_abs_(ts), torch._foreach_sqrt_(ts)),
    "data.mul_": each(lambda t: t.data.mul_(3)),
    "data.zero_": each(lambda t: t.data.zero_()),
    "detach().mul_": each(lambda t: t.detach().mul_(3)),
    "nan_to_num_": each(lambda t: t.data.nan_to_num_().mul_(2)),
    "numpy": each(in_numpy),
    "memmove": each(in_memory),
    "the storage": each(storage_filled),
    "some rows": each(row_masked),
    "one element": each(one_element),
    "a view": each(ravelled_view),
    "halves": each(halves_swapped_and_scaled),
    "set_": each(set_to_another),
    "bernoulli": each(lambda t: t.data.bernoulli_(0.5)),
    "inference mode": each(in_inference_mode),
    "out=": each(lambda t: torch.mul(t.data, 3, out=t.data)),
    "index_fill_": each(lambda t: t.data.index_fill_(0, torch.tensor([0]), 9.0)),
    "compiled": each(compiled),
    "broadcast": each(lambda t: dist.is_initialized() and dist.broadcast(t, 0)),
    "all_reduce": each(lambda t: dist.is_initialized() and dist.all_reduce(t)),
    "all_reduce, asynchronous": each(
        lambda t: dist.is_initialized() and dist.all_reduce(t, async_op=True).wait()
    ),
    "all_gather into it": each(lambda t: dist.is_initialized() and _gathered_into(t)),
}


def _gathered_into(local):
    parts = list(local.view(-1).split(max(1, local.numel() // dist.get_world_size())))
    whole = [torch.full_like(part, 2.0) for part in parts[: dist.get_world_size()]]
    if len(whole) == dist.get_world_size() and len({p.numel() for p in whole}) == 1:
        dist.all_gather(parts[: len(whole)], whole[0])


def with_torch(name, model):
    """torch's own functions, as a loop calls them."""
    parameters = list(model.parameters())
    if name == "torch's clip_grad_norm_":
        nn.utils.clip_grad_norm_(parameters, 0.1)
    elif name == "torch's clip_grads_with_norm_":
        nn.utils.clip_grads_with_norm_(parameters, 0.1, torch.tensor(5.0))
    elif name == "torch's clip_grad_value_":
        nn.utils.clip_grad_value_(parameters, 0.01)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(1))
        scaler.unscale_(torch.optim.SGD(parameters, 0.1))


def stepped(model, optimizer_free_loss, change) -> None:
    """Two clippers' steps on changed gradients: one that leaves them alone, one that clips."""
    with every_size_hooked():
        clipper = GradClipper(model, FAR, overlap=True)
        optimizer_free_loss(model)
        clipper.clip_()  # from now on the hooks know what to read
        for limit in (FAR, 0.05):
            model.zero_grad()
            clipper.max_norm = limit
            optimizer_free_loss(model)
            assert clipper._collector.overlap.early
            change(model)
            found = float(clipper.clip_().total_norm)
            grads = [whole(p.grad) for p in model.parameters()]
            if limit == FAR:
                assert found == pytest.approx(exact_norm(grads), rel=1e-6)
            else:
                assert exact_norm(grads) <= limit * (1 + 1e-5)


@contextmanager
def every_size_hooked():
    small, overlap.SMALL = overlap.SMALL, 1
    try:
        yield
    finally:
        overlap.SMALL = small


def whole(grad):
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def right(model) -> float:
    return exact_norm([p.grad for p in model.parameters()])


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))


def backward(model) -> None:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    model(torch.randn(6, 8)).square().mean().mul(40).backward()


def changed(kind: str, name: str):
    if kind == "list" and ON_LISTS[name] is None:
        return lambda model: with_torch(name, model)
    table = ON_LISTS if kind == "list" else ON_LOCALS

    def change(model):
        grads = [p.grad for p in model.parameters()]
        table[name](grads if kind == "list" else [local_of(grad) for grad in grads])

    return change


CASES = [("list", name) for name in ON_LISTS] + [("locals", name) for name in ON_LOCALS]


@pytest.mark.parametrize("kind, name", CASES)
def test_in_one_process(kind, name):
    stepped(model_of(), backward, changed(kind, name))


@pytest.mark.parametrize("kind, name", CASES)
@on_ranks(2)
def test_under_fsdp2(kind, name):
    model = model_of()
    fully_shard(model, mesh=mesh_of(2, names=("shard",)))
    stepped(model, backward, changed(kind, name))


def shaken(parameter):
    """A hook of the user's own, which changes the gradient when ours may have run already."""

    def hook(p):
        p.grad.data.mul_(3)

    parameter.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("ours_first", [True, False])
def test_hooks_of_somebody_else(ours_first):
    with every_size_hooked():
        model = model_of()
        first = next(model.parameters())
        if not ours_first:
            shaken(first)
        clipper = GradClipper(model, FAR, overlap=True)
        if ours_first:
            shaken(first)
        for _ in range(3):
            model.zero_grad()
            backward(model)
            total = clipper.clip_().total_norm
            assert float(total) == pytest.approx(
                exact_norm([p.grad for p in model.parameters()]), rel=1e-6
            )


@pytest.mark.parametrize("keeps", [True, False])
def test_micro_batches_that_are_added_up(keeps):
    """Also where the gradients stay and are set to zero: they are added to in place."""
    with every_size_hooked():
        model = model_of()
        clipper = GradClipper(model, FAR, overlap=True)
        for batches in (1, 3, 3, 1, 2):
            model.zero_grad(set_to_none=not keeps)
            for _ in range(batches):
                backward(model)
            total = clipper.clip_().total_norm
            assert float(total) == pytest.approx(
                exact_norm([p.grad for p in model.parameters()]), rel=1e-6
            )


def test_a_lazy_copy_goes_with_its_gradient():
    """Else the memory of a step that is not clipped would stay till the next one."""
    with every_size_hooked():
        model = model_of()
        clipper = GradClipper(model, FAR, overlap=True)
        backward(model)
        clipper.clip_()
        model.zero_grad()
        backward(model)
        assert clipper._collector.overlap.early
        model.zero_grad()
        assert not clipper._collector.overlap.early


def test_clipping_copies_nothing():
    """The lazy copies are gone before anything is multiplied, so gradients stay where they are."""
    with every_size_hooked():
        model = model_of()
        clipper = GradClipper(model, 1e-3, overlap=True)
        for _ in range(2):
            model.zero_grad()
            backward(model)
            places = [torch._C._data_address(p.grad) for p in model.parameters()]
            clipper.clip_()
            assert [torch._C._data_address(p.grad) for p in model.parameters()] == places


def test_a_drop_in_call_between_is_seen():
    with every_size_hooked():
        model = model_of()
        clipper = GradClipper(model, FAR, overlap=True)
        for _ in range(2):
            model.zero_grad()
            backward(model)
            clip_grad_norm_(model.parameters(), 0.1)
            assert float(clipper.clip_().total_norm) == pytest.approx(0.1, rel=1e-4)
