"""What the benchmark counts, on operators whose traffic is known."""

import pytest
import torch

from benchmarks.counting import counting

GRADIENT = torch.zeros(1000)
HALF = torch.zeros(1000, dtype=torch.float16)


def reads(call, gradients=()):
    with counting(gradients) as counts:
        call()
    return counts


@pytest.mark.parametrize(
    "call, read, written",
    [
        (lambda t: t + 1, 4000, 4000),
        (lambda t: t.mul_(2), 4000, 4000),
        (lambda t: torch._foreach_mul_([t, t[:10]], 2.0), 4040, 4040),
        (lambda t: t.dot(t), 4000, 4),
        (lambda t: t.zero_(), 0, 4000),
        (lambda t: t.copy_(HALF), 2000, 4000),
        (lambda t: torch.linalg.vector_norm(t.view(10, 100), dim=1, out=t[:10]), 4000, 40),
        (lambda t: t.view(10, 100).t()[2:].detach(), 0, 0),
        (torch.empty_like, 0, 0),
        (lambda t: torch.cat([t, t[:500]]), 6000, 6000),
        (lambda t: t[torch.tensor([1, 7, 9])], 12, 12),
        (lambda t: t[:1].expand(1000) + t, 4004, 4000),
        (lambda t: torch.arange(10).gather(0, torch.arange(2)), 0, 0),  # no floating point
    ],
)
def test_bytes_of_known_operators(call, read, written):
    counts = reads(lambda: call(GRADIENT.clone()))
    clone = 4000
    assert (counts.read - clone, counts.written - clone) == (read, written)


def test_what_is_the_gradients_own_is_told_apart():
    other = torch.zeros(10)
    counts = reads(lambda: (GRADIENT[100:200].add_(1), other.add_(1)), [GRADIENT])
    assert (counts.read, counts.written) == (440, 440)
    assert (counts.gradients_read, counts.gradients_written) == (400, 400)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_fused_optimizer_writes_gradients_only_where_it_scales_them(scaled):
    parameter = torch.nn.Parameter(torch.zeros(100))
    parameter.grad = torch.ones(100)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    if scaled:
        optimizer.grad_scale = torch.tensor(2.0)
        optimizer.found_inf = torch.tensor(0.0)
    counts = reads(optimizer.step, [parameter.grad])
    assert counts.gradients_read == 400
    assert counts.gradients_written == (400 if scaled else 0)


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda t: t.sum(), 0),
        (lambda t: t.sum().item(), 1),
        (lambda t: float(t[0]), 1),
        (lambda t: bool(t[0] > 0), 1),
        (lambda t: t.nonzero(), 1),
        (lambda t: t.tolist(), 1),
        (lambda t: t.cpu(), 1),
        (lambda t: t.numpy(), 1),
        (lambda t: [t[0].item(), t[1].item()], 2),
    ],
)
def test_reads_by_the_host(call, expected):
    assert reads(lambda: call(GRADIENT)).host_reads == expected


def test_tensors_are_as_they_were_afterwards():
    before = torch.Tensor.tolist
    reads(lambda: None)
    assert torch.Tensor.tolist is before
    assert "tolist" not in vars(torch.Tensor)
