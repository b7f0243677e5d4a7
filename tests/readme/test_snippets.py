"""Every snippet of the README runs, and the clipped ones clip to the threshold."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardclip
from tests.ranks import everywhere, run_on_ranks
from tests.readme import settings

README = Path(__file__).parents[2] / "README.md"
MARKED = re.compile(
    r"<!-- run: (?P<setting>\w+)(?: on (?P<ranks>\d) ranks)? -->\n```python\n(?P<code>.*?)```"
    r"(?:\n\n<!-- prints -->\n```text\n(?P<prints>.*?)```)?",
    re.DOTALL,
)
SNIPPETS = [match.groupdict() for match in MARKED.finditer(README.read_text())]


def run_snippet(setting: str, code: str) -> str:
    """Run one snippet in its setting; what it printed."""
    found = getattr(settings, setting)()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), found)
    result = found.get("result")
    if result is not None:
        assert float(result.total_norm) > 1
        assert len(set(everywhere(float(result.total_norm)))) == 1
        assert result.clipped_norm == pytest.approx(1.0, rel=1e-5)
    return printed.getvalue()


def clipped_to_one(setting: str, code: str) -> None:
    """Run a snippet that leaves clipped gradients behind, and measure them again."""
    found = getattr(settings, setting)()
    exec(compile(code, "README.md", "exec"), found)
    norm = shardclip.clip_grad_norm_(found["model"], float("inf"))
    torch.testing.assert_close(norm, torch.tensor(1.0), rtol=1e-4, atol=0)
    assert dist.get_world_size() > 1


def test_every_python_block_is_run():
    assert len(SNIPPETS) == README.read_text().count("```python")


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda s: s["setting"])
def test_snippet(snippet):
    if snippet["ranks"] is None:
        assert run_snippet(snippet["setting"], snippet["code"]) == snippet["prints"]
        return
    ranks = int(snippet["ranks"])
    run_on_ranks(ranks, run_snippet, setting=snippet["setting"], code=snippet["code"])


@pytest.mark.parametrize(
    "snippet",
    [s for s in SNIPPETS if "clip_grad_norm_(" in s["code"] or "clipper.step(" in s["code"]],
    ids=lambda s: s["setting"],
)
def test_snippet_leaves_clipped_gradients(snippet):
    ranks = int(snippet["ranks"])
    run_on_ranks(ranks, clipped_to_one, setting=snippet["setting"], code=snippet["code"])
