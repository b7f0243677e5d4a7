"""Every snippet of the README and of docs/ runs, and the clipped ones clip to the threshold."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist

import shardclip
from tests.programs.starting import run
from tests.ranks import everywhere, run_on_ranks
from tests.readme import settings
from tests.readme.snippets import (
    PAGES,
    README,
    blocks,
    elsewhere,
    launched,
    snippets,
    unknown_names,
)

SNIPPETS = [snippet for page in PAGES for snippet in snippets(page)]


BEFORE_LAUNCH = """
from tests.readme.settings import launched
globals().update(launched())
"""
AFTER_LAUNCH = """
assert float(result.total_norm) > 1
assert abs(result.clipped_norm - 1) < 1e-5
torch.distributed.destroy_process_group()
"""


def named(snippet: dict) -> str:
    return f"{snippet['page'].removesuffix('.md')}-{snippet['setting']}"


def run_snippet(setting: str, code: str) -> str:
    """Run one snippet in its setting; what it printed."""
    found = getattr(settings, setting)()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "snippet", "exec"), found)
    result = found.get("result")
    if result is not None:
        assert float(result.total_norm) > 1
        if dist.is_initialized():
            assert len(set(everywhere(float(result.total_norm)))) == 1
        assert result.clipped_norm == pytest.approx(1.0, rel=1e-5)
    return printed.getvalue()


def clipped_to_one(setting: str, code: str) -> None:
    """Run a snippet that leaves clipped gradients behind, and measure them again."""
    found = getattr(settings, setting)()
    exec(compile(code, "snippet", "exec"), found)
    clipper = shardclip.GradClipper(found["model"], None, layout=found.get("layout"))
    norm = clipper.clip_().total_norm
    torch.testing.assert_close(norm, torch.tensor(1.0), rtol=1e-4, atol=0)
    assert dist.get_world_size() > 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_python_block_is_marked(page):
    ran = [snippet["code"] for snippet in snippets(page)]
    other = [snippet["code"] for snippet in elsewhere(page)] + launched(page)
    if page == README:
        assert not elsewhere(page)
    assert len(ran) + len(other) == len(blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_exist(page):
    for code in blocks(page):
        assert unknown_names(code) == [], code


def test_names_that_do_not_exist_are_seen():
    code = "from shardclip.adapters import nobody\nGradClipper.of_nobody\nshardclip.nothing\n"
    expected = ["shardclip.adapters.nobody", "GradClipper.of_nobody", "shardclip.nothing"]
    assert sorted(unknown_names(code)) == sorted(expected)


@pytest.mark.parametrize("code", [code for page in PAGES for code in launched(page)])
def test_a_launched_snippet_stops_on_all_ranks_at_the_same_step(code, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"{BEFORE_LAUNCH}\n{code}\n{AFTER_LAUNCH}")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    saved = [line.split(" saved ") for line in run(*torchrun, str(script)).splitlines()]
    assert {rank for rank, _ in saved} == {"0", "1"}
    assert len({step for _, step in saved}) == 1


@pytest.mark.parametrize("snippet", SNIPPETS, ids=named)
def test_snippet(snippet):
    if snippet["ranks"] is None:
        assert run_snippet(snippet["setting"], snippet["code"]) == (snippet["prints"] or "")
        return
    ranks = int(snippet["ranks"])
    run_on_ranks(ranks, run_snippet, setting=snippet["setting"], code=snippet["code"])


@pytest.mark.parametrize(
    "snippet",
    [
        snippet
        for snippet in SNIPPETS
        if ("clip_grad_norm_(" in snippet["code"] or "clipper.step(" in snippet["code"])
        and snippet["ranks"] is not None
        and "zero_grad" not in snippet["code"]
    ],
    ids=named,
)
def test_snippet_leaves_clipped_gradients(snippet):
    ranks = int(snippet["ranks"])
    run_on_ranks(ranks, clipped_to_one, setting=snippet["setting"], code=snippet["code"])
