"""Counts that a change may not raise: all-reduces, bytes and host syncs of a step."""

import pytest
import torch

from benchmarks.cases import build, parse, quick
from benchmarks.contenders import CONTENDERS
from benchmarks.counting import as_on_a_device, counting
from shardclip import GradClipper
from tests.ranks import on_ranks

CONSTANT = 4096  # bytes: payload, norms of rows


def of_step(gradients, headroom, **settings):
    """Count a step that is not the first."""
    clipper = GradClipper(gradients.target, gradients.norm * headroom, **settings)
    for _ in range(2):
        gradients.restore()
        clipper.clip_()
    gradients.restore()
    with counting(gradients.locals) as counts:
        result = clipper.clip_()
    assert float(result.total_norm) == pytest.approx(gradients.norm, rel=1e-6)
    assert result.clipped == (headroom < 1)
    return counts


def large(name):
    """Gradients of a case with blocks large enough that a constant does not count."""
    case = parse(name)
    return build(case.__class__(case.layout, shapes_of(case), case.dtype, case.ranks), seed=1)


def shapes_of(case):
    blocks = tuple(((1024, 256), (256,)) for _ in range(4))
    return case.shapes.__class__("some", "some", blocks)


LAYOUTS = ["fsdp2/layers", "hsdp/layers", "fsdp-tp/layers", "two-meshes/layers"]


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(4)
def test_the_usual_step_reads_once_and_writes_nothing(name):
    gradients = large(name)
    counts = of_step(gradients, 2.0)
    assert (counts.all_reduces, counts.collectives) == (1, 1)
    assert counts.gradients_read <= 1.05 * gradients.bytes
    assert counts.read <= 1.05 * gradients.bytes + CONSTANT
    assert counts.gradients_written == 0


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(4)
def test_a_clipped_step_reads_twice_and_writes_once(name):
    gradients = large(name)
    counts = of_step(gradients, 0.5)
    assert (counts.all_reduces, counts.collectives) == (1, 1)
    assert counts.gradients_read <= 2.05 * gradients.bytes
    assert counts.gradients_written == gradients.bytes


@on_ranks(4)
def test_replicas_share_the_reading():
    gradients = large("hsdp/layers")
    counts = of_step(gradients, 2.0)
    assert counts.gradients_read <= 0.55 * gradients.bytes + CONSTANT


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@on_ranks(1)
def test_every_dtype_is_read_once(dtype):
    gradients = large(f"plain/layers/{dtype}".removesuffix("/fp32"))
    counts = of_step(gradients, 2.0)
    assert counts.gradients_read <= 1.05 * gradients.bytes
    assert counts.gradients_written == 0


@on_ranks(2)
def test_reads_by_the_host_do_not_grow_with_the_number_of_parameters():
    few, many = (
        build(quick(parse(f"fsdp2/{shapes}@2")), seed=1) for shapes in ("small-10", "small")
    )
    assert len(many.parameters) > len(few.parameters)
    assert of_step(many, 2.0).host_reads == of_step(few, 2.0).host_reads


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(4)
def test_no_host_sync_where_reading_is_not_free(name):
    gradients = build(quick(parse(name)), seed=1)
    clipper = GradClipper(gradients.target, gradients.norm / 2)
    with as_on_a_device():
        for _ in range(2):
            gradients.restore()
            clipper.clip_()
        gradients.restore()
        with counting() as counts:
            clipper.clip_()
    assert counts.host_reads == 0
    assert counts.all_reduces == 1


@on_ranks(4)
def test_every_way_to_clip_agrees_with_the_true_norm():
    gradients = build(quick(parse("fsdp2/gpt2-small")), seed=1)
    for contender in CONTENDERS:
        if contender.fits(gradients.case) and contender.lacking() is None:
            gradients.restore()
            clipping = contender.make(gradients)
            clipping.backward()
            found = clipping.clip(gradients.norm / 2)
            whole = found.full_tensor() if hasattr(found, "full_tensor") else found
            assert float(whole) == pytest.approx(gradients.norm, rel=1e-5), contender.name
            if contender.does == "clip":
                for local, saved in zip(gradients.locals, gradients.saved, strict=True):
                    torch.testing.assert_close(local, saved / 2, rtol=1e-4, atol=1e-6)


@on_ranks(4)
def test_overlap_leaves_the_step_little_to_read():
    gradients = large("fsdp2/layers")
    overlapping = next(one for one in CONTENDERS if one.name == "GradClipper(overlap=True)")
    clipping = overlapping.make(gradients)
    for _ in range(2):
        gradients.restore()
        with counting(gradients.locals) as hooks:
            clipping.backward()
        with counting(gradients.locals) as step:
            clipping.clip(gradients.norm * 2)
    assert hooks.collectives == 0
    assert hooks.gradients_read + step.gradients_read <= 1.05 * gradients.bytes
    assert step.gradients_read <= 0.01 * gradients.bytes  # small ones are summed together, here
    assert step.gradients_written == 0
    assert step.all_reduces == 1
