"""Megatron-core's tensor-parallel layers, DDP and optimizers: the true norm, inside step()."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardclip import GradClipper, ReplicaMismatchError, clip_grad_norm_
from shardclip.layout.adapters import megatron as adapter
from tests.ranks import count_collectives, everywhere, raised_everywhere
from tests.ranks.tensors import coefficient, exact_norm
from tests.ranks.unsharded import assert_norm, assert_one_all_reduce
from tests.systems.frameworks import on_ranks
from tests.systems.megatron_model import batch, config, cut, sharded, truth
from tests.systems.megatron_on_cpu import megatron

LR, DECAY = 1.0, 0.9  # Adam's first moment after one step is a tenth of the gradient


def optimizer_of(net, settings, distributed: bool):
    """Megatron's DDP and optimizer, with a limit of its own that must not be used."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    told = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=False,
    )
    model = DistributedDataParallel(settings, told, net)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LR,
            adam_beta1=DECAY,
            clip_grad=1e-5,
            use_distributed_optimizer=distributed,
            bf16=settings.bf16,
            params_dtype=settings.params_dtype,
            weight_decay=0.0,
        ),
        [model],
    )
    return model, optimizer


def backward(model, optimizer, scale: float = 1.0) -> None:
    from megatron.core import parallel_state as state

    model.zero_grad_buffer()
    optimizer.zero_grad()
    inputs = batch(state.get_data_parallel_rank()).to(next(model.parameters()).dtype)
    (model(inputs).float().square().mean() * scale).backward()
    model.finish_grad_sync()


def stepped_gradients(optimizer, model) -> dict[str, tuple[torch.Tensor, slice]]:
    """By name, what Adam saw: from its first moment; and which part of the local parameter."""
    names = {id(one): name.removeprefix("module.") for name, one in model.named_parameters()}
    found = {}
    for one in optimizer.chained_optimizers:
        cut_over_dp = hasattr(one, "shard_fp32_groups")
        for parameter, main in adapter._pairs(one, cut_over_dp):
            where = slice(None)
            if cut_over_dp:
                span = one._get_model_param_range_map(parameter)["param"]
                where = slice(span.start, span.end)
            moment = one.optimizer.state[main]["exp_avg"] / (1 - DECAY)
            found[names[id(parameter)]] = moment, where
    return found


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(4)
def test_clips_like_the_unsharded_model(distributed, dtype):
    """Tensor parallel 2, data parallel 2; norms and the row bias are copies over the former."""
    from megatron.core import parallel_state as state

    expected = truth(2, dtype)
    total = exact_norm(expected.values())
    rough = 3e-2 if dtype == torch.bfloat16 else 1e-5
    with megatron(tensor_model_parallel_size=2):
        settings = config(dtype, tensor_model_parallel_size=2)
        model, optimizer = optimizer_of(sharded(settings), settings, distributed)
        clipper = GradClipper.from_megatron(optimizer, [model], total / 4, norms="parameter")
        backward(model, optimizer)
        optimizer.prepare_grads()
        with count_collectives() as calls:
            norm = optimizer.get_grad_norm()
        assert_one_all_reduce(calls)
        assert_norm(norm, total, rtol=rough)
        backward(model, optimizer)
        ok, norm, _ = optimizer.step()
        assert ok
        assert_norm(norm, total, rtol=rough)
        assert clipper.result.norms.keys() == expected.keys()
        for name, found in clipper.result.norms.items():
            assert found == pytest.approx(exact_norm([expected[name]]), rel=2 * rough)
        factor = coefficient(total, total / 4)
        rank = state.get_tensor_model_parallel_rank()
        stepped = stepped_gradients(optimizer, model)
        assert set().union(*everywhere(set(stepped))) == set(expected)
        for name, (gradient, where) in stepped.items():
            wanted = cut(name, expected[name] * factor, rank, 2).reshape(-1)[where].float()
            torch.testing.assert_close(
                gradient.reshape(-1), wanted, rtol=rough, atol=rough * total / 10
            )


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@on_ranks(2)
def test_agrees_with_megatrons_norm_where_that_is_right(distributed):
    with megatron(tensor_model_parallel_size=2):
        settings = config(torch.float32, tensor_model_parallel_size=2)
        norms = []
        for clips in (False, True):
            model, optimizer = optimizer_of(sharded(settings), settings, distributed)
            if clips:
                GradClipper.from_megatron(optimizer, [model], max_norm=1.0)
            backward(model, optimizer)
            norms.append(float(optimizer.step()[1]))
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@on_ranks(4)
def test_experts_count_over_the_expert_groups(distributed):
    """Dense layers are copies on four ranks, each expert on two."""
    from megatron.core import parallel_state as state

    with megatron(expert_model_parallel_size=2, expert_tensor_parallel_size=1):
        settings = config(torch.float32, expert_model_parallel_size=2, num_moe_experts=2)
        net = sharded(settings, expert=True)
        torch.manual_seed(state.get_expert_model_parallel_rank())
        nn.init.normal_(net.expert.weight)
        model, optimizer = optimizer_of(net, settings, distributed)
        assert not net.expert.weight.allreduce
        clipper = GradClipper.from_megatron(optimizer, [model], 1e-3, norms="parameter")
        backward(model, optimizer)
        held = full_gradients(net, optimizer, distributed)
        told = everywhere((state.get_expert_model_parallel_rank(), held))
        experts = {number: grads["expert.weight"] for number, grads in told}
        biases = {number: grads["expert.bias"] for number, grads in told}
        dense = [g for name, g in held.items() if not name.startswith("expert")]
        total = exact_norm([*dense, *experts.values(), *biases.values()])
        assert len(experts) == 2
        ok, norm, _ = optimizer.step()
        assert ok
        assert_norm(norm, total)
        seen = stepped_gradients(optimizer, model)
        for name, (gradient, where) in seen.items():
            wanted = (held[name] * coefficient(total, 1e-3)).reshape(-1)[where]
            torch.testing.assert_close(gradient.reshape(-1), wanted, rtol=1e-5, atol=1e-9)
        assert clipper.result.clipped


def full_gradients(net, optimizer, distributed) -> dict[str, torch.Tensor]:
    """This rank's model gradients; the distributed optimizer's put together from their ranges."""
    from megatron.core import parallel_state as state

    known = dict(net.named_parameters())
    if not distributed:
        return {name: one.main_grad.clone() for name, one in known.items()}
    names = {id(one): name for name, one in known.items()}
    found = {name: torch.zeros_like(one.main_grad) for name, one in known.items()}
    for one in optimizer.chained_optimizers:
        for parameter, _ in adapter._pairs(one, True):
            span = one._get_model_param_range_map(parameter)["param"]
            part = parameter.main_grad.view(-1)[span.start : span.end]
            found[names[id(parameter)]].view(-1)[span.start : span.end] = part
    for name, one in found.items():
        expert = name.startswith("expert")
        group = (
            state.get_expert_data_parallel_group() if expert else state.get_data_parallel_group()
        )
        dist.all_reduce(one, group=group)
    return found


@on_ranks(4)
def test_a_tied_embedding_counts_once():
    """Pipeline 2, data parallel 2: both stages have the embedding, with the same gradient."""
    from megatron.core import parallel_state as state

    with megatron(pipeline_model_parallel_size=2):
        torch.manual_seed(3)
        tied, *others = torch.randn(3, 6, 4)
        stage = state.get_pipeline_model_parallel_rank()
        embedding, body = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(6, 4))
        embedding.shared_embedding = True
        embedding.shared = stage == 1
        embedding.grad, body.grad = tied.clone(), others[stage].clone()
        total = exact_norm([tied, *others])
        with count_collectives() as calls:
            norm = clip_grad_norm_([embedding, body], total / 4, layout=adapter.layout())
        assert_one_all_reduce(calls)
        assert_norm(norm, total)
        torch.testing.assert_close(embedding.grad, tied / 4, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(body.grad, others[stage] / 4, rtol=1e-5, atol=1e-7)


@on_ranks(4)
def test_the_functions_with_a_layout_from_attributes():
    """No Megatron optimizer: its tensor-parallel layers and .grad alone."""
    from megatron.core import parallel_state as state

    expected = truth(2, torch.float32)
    total = exact_norm(expected.values())
    with megatron(tensor_model_parallel_size=2):
        net = sharded(config(torch.float32, tensor_model_parallel_size=2))
        net(batch(state.get_data_parallel_rank())).square().mean().backward()
        parameters = list(net.parameters())
        layout = adapter.layout()
        raised_everywhere(
            lambda: clip_grad_norm_(parameters, 1e-3, layout=layout), ReplicaMismatchError
        )  # not averaged over dp yet
        for one in parameters:
            dist.all_reduce(one.grad, group=state.get_data_parallel_group())
            one.grad /= 2
        assert_norm(clip_grad_norm_(parameters, total / 4, layout=layout), total, rtol=1e-5)
        factor = coefficient(total, total / 4)
        for name, one in net.named_parameters():
            wanted = cut(name, expected[name], state.get_tensor_model_parallel_rank(), 2) * factor
            torch.testing.assert_close(one.grad, wanted.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(4)
def test_main_gradients_of_its_ddp_alone(dtype):
    from megatron.core import parallel_state as state

    expected = truth(2, dtype)
    total = exact_norm(expected.values())
    rough = 3e-2 if dtype == torch.bfloat16 else 1e-5
    with megatron(tensor_model_parallel_size=2):
        settings = config(dtype, tensor_model_parallel_size=2)
        model, optimizer = optimizer_of(sharded(settings), settings, distributed=False)
        clipper = GradClipper(model, total / 4, layout=adapter.layout(), grad=adapter.read)
        backward(model, optimizer)
        with count_collectives() as calls:
            result = clipper.clip_()
        assert_one_all_reduce(calls)
        assert_norm(result.total_norm, total, rtol=rough)
        factor = coefficient(total, total / 4)
        for name, one in model.module.named_parameters():
            wanted = cut(name, expected[name], state.get_tensor_model_parallel_rank(), 2) * factor
            torch.testing.assert_close(
                one.main_grad, wanted.float(), rtol=rough, atol=rough * total / 10
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_an_optimizer_that_is_not_chained(dtype):
    with megatron(tensor_model_parallel_size=2):
        settings = config(dtype, tensor_model_parallel_size=2)
        model, chained = optimizer_of(sharded(settings), settings, distributed=False)
        optimizer = chained.chained_optimizers[0]
        first = GradClipper.from_megatron(optimizer, [model], 1.0)
        clipper = GradClipper.from_megatron(optimizer, [model], 1e-2)  # replaces the first
        backward(model, optimizer)
        ok, norm, _ = optimizer.step()
        assert ok
        assert (first.steps, clipper.steps) == (0, 1)
        assert norm == clipper.result.total_norm
        seen = [gradient for gradient, _ in stepped_gradients(chained, model).values()]
        told = everywhere(clipper.result.clipped_norm)
        assert told == [pytest.approx(1e-2, rel=1e-3)] * 2
        assert exact_norm(seen) < 1.1e-2


@on_ranks(2)
def test_a_skipped_step_changes_nothing():
    with megatron(tensor_model_parallel_size=2):
        settings = config(torch.float32, tensor_model_parallel_size=2)
        model, optimizer = optimizer_of(sharded(settings), settings, distributed=False)
        clipper = GradClipper.from_megatron(optimizer, [model], 1.0, nonfinite="skip")
        backward(model, optimizer, torch.inf if dist.get_rank() == 1 else 1.0)
        before = [one.detach().clone() for one in model.parameters()]
        assert not optimizer.step()[0]
        assert clipper.skipped == 1
        for one, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(one, old)
        backward(model, optimizer)
        assert optimizer.step()[0]


@on_ranks(1)
def test_precision_aware_optimizers_keep_the_gradient_beside_the_parameter():
    """They need Transformer Engine, so the parameter is made by hand."""
    parameter = nn.Parameter(torch.zeros(2))
    assert adapter.read(parameter) is None
    parameter.main_grad = torch.ones(2)
    assert adapter.read(parameter) is parameter.main_grad
    parameter.decoupled_grad = torch.ones(2, dtype=torch.bfloat16)
    assert adapter.read(parameter) is parameter.decoupled_grad
