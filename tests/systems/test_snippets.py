"""Every snippet of the docs for a framework runs with it, and clips to the threshold of 1."""

import inspect
from unittest import mock

import pytest
import torch

from shardclip import ClipResult
from shardclip.comm import reduce
from tests.ranks import run_on_ranks, same_everywhere
from tests.ranks.tensors import coefficient
from tests.readme.snippets import PAGES, elsewhere
from tests.systems import loops, settings

OTHER_PACKAGES = {"tensorflow", "optax"}
"""Whose own lines stand beside ours."""
SNIPPETS = [
    snippet for page in PAGES for snippet in elsewhere(page) if snippet["of"] not in OTHER_PACKAGES
]


def test_each_framework_has_snippets():
    made = vars(settings).items()
    frameworks = {name for name, one in made if inspect.isgeneratorfunction(inspect.unwrap(one))}
    assert frameworks == {snippet["of"] for snippet in SNIPPETS}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda one: f"{one['page']}-{one['of']}")
def test_it_runs_and_clips(snippet):
    told = {"framework": snippet["of"], "code": snippet["code"]}
    run_on_ranks(loops.RANKS, check, limit_s=300, **told)


def check(framework: str, code: str) -> None:
    """Run a snippet; what it leaves are the unsharded gradients, clipped, by whose lines it says.

    Those of "before" are the framework's own, whose norms are as exact as they are.
    """
    ours = "shardclip" in code or "GradClipper" in code
    with loops.torchrun_environment(), getattr(settings, framework)() as setting:
        names, total = dict(setting.names), setting.total
        assert total > 2
        with mock.patch.object(reduce, "all_reduce", wraps=reduce.all_reduce) as sent:
            exec(compile(code, "snippet", "exec"), names)
        assert sent.call_count == ours
        left, rtol = setting.left(), 1e-5 if ours else 1e-3
        assert left.keys() == setting.exact.keys()
        for name, gradient in setting.exact.items():
            wanted = (gradient * coefficient(total, 1.0)).to(left[name].dtype)
            torch.testing.assert_close(left[name], wanted, rtol=max(rtol, 1e-4), atol=1e-6)
        for norm in reported(names):
            assert float(norm) == pytest.approx(total, rel=rtol)
            assert same_everywhere(float(norm).hex())


def reported(names: dict) -> list[torch.Tensor]:
    """The norms that a snippet has kept: of its own names, and in what it clips with."""
    norms = [names[name] for name in ("norm", "total_norm", "grad_norm") if name in names]
    kept = [getattr(one, "result", one) for one in names.values()]
    return norms + [one.total_norm for one in kept if isinstance(one, ClipResult)]
