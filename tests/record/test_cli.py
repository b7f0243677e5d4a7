"""The command `shardclip`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardclip import __version__
from shardclip.cli import main

from .runs import outcome, steps, written

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    return written(tmp_path / "run.jsonl", steps(100, spikes=(60,)))


def refused(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize(("action", "ending"), [("plot", ".png"), ("report", ".html")])
def test_the_picture_lies_beside_the_run(run, capsys, action, ending):
    assert main([action, str(run)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{run.with_suffix(ending)}\n"
    assert err == ""
    assert run.with_suffix(ending).stat().st_size > 10_000


@pytest.mark.parametrize(("action", "ending"), [("plot", ".svg"), ("report", ".html")])
def test_several_runs_and_another_file(run, tmp_path, action, ending):
    other = written(tmp_path / "other.jsonl", steps(50, level=0.1), run="the other")
    output = tmp_path / f"both{ending}"
    assert main([action, str(run), str(other), "-o", str(output)]) == 0
    assert "the other" in output.read_text()


def test_suggest_recommends(run, capsys):
    assert main(["suggest", str(run), str(run)]) == 0
    out = capsys.readouterr().out
    assert out.count("recommended: max_norm=") == 2
    assert max(map(len, out.splitlines())) <= 80


def test_suggest_takes_a_warm_up(run, capsys):
    assert main(["suggest", "--warmup", "30", str(run)]) == 0
    assert "the first 30 steps, warm-up (--warmup)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["suggest", "--warmup", "-3", str(run)])


@pytest.mark.parametrize("action", ["plot", "report", "suggest"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("", "is empty"), ("no\njson\n", "line 1: no JSON object")],
)
def test_bad_input_is_refused(tmp_path, capsys, action, content, message):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    said = refused(capsys, action, path)
    assert said.startswith(f"shardclip {action}: {path}")
    assert message in said
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix != ".jsonl"] == []


def test_what_was_passed_over_is_said(run, capsys):
    with run.open("rb+") as file:
        file.truncate(run.stat().st_size - 9)
    assert main(["suggest", str(run)]) == 0
    out, err = capsys.readouterr()
    assert "recommended" in out
    assert err == f"shardclip suggest: {run}: line 101 was cut short and is left out\n"


@pytest.mark.parametrize("action", ["plot", "report"])
def test_the_run_is_not_written_over(run, capsys, action):
    before = run.read_bytes()
    itself = run.parent / "." / ".." / run.parent.name / run.name
    assert "is the run itself" in refused(capsys, action, run, "-o", itself)
    assert run.read_bytes() == before


@pytest.mark.parametrize(
    ("action", "output", "message"),
    [
        ("plot", "a.jpegs", "no such kind of picture"),
        ("plot", "none/a.png", "No such file or directory"),
        ("report", "none/a.html", "No such file or directory"),
    ],
)
def test_an_output_that_cannot_be_is_refused(run, capsys, action, output, message):
    assert message in refused(capsys, action, run, "-o", run.parent / output)


def test_too_short_a_run_is_refused(tmp_path, capsys):
    path = written(tmp_path / "run.jsonl", [outcome(step) for step in range(1, 5)])
    assert "quantiles need at least 20" in refused(capsys, "suggest", path)


def shell(command):
    return subprocess.run(
        ["bash", "-c", command],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


MAIN = f"{sys.executable} -c 'import sys; from shardclip.cli import main; sys.exit(main())'"


@pytest.mark.processes
def test_a_reader_that_leaves_is_no_error(run):
    runs = " ".join([str(run)] * 200)
    done = shell(f"set -o pipefail; {MAIN} suggest {runs} | head -1")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.processes
def test_it_needs_neither_torch_nor_matplotlib_to_suggest(run):
    code = (
        "import sys; from shardclip.cli import main; "
        f"main(['suggest', {str(run)!r}]); print({{'torch', 'matplotlib'}} & set(sys.modules))"
    )
    assert shell(f'{sys.executable} -c "{code}"').stdout.endswith("set()\n")


@pytest.mark.processes
def test_a_missing_matplotlib_is_named_with_its_extra(run):
    code = (
        "import sys; sys.modules['matplotlib'] = None; from shardclip.cli import main; "
        f"sys.exit(main(['plot', {str(run)!r}]))"
    )
    done = shell(f'{sys.executable} -c "{code}"')
    assert done.returncode == 2
    assert done.stderr == (
        "shardclip plot: matplotlib is not installed: pip install 'matplotlib>=3.8'\n"
    )


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"shardclip {__version__}\n"


@pytest.mark.processes
def test_as_a_module(run):
    words = [sys.executable, "-m", "shardclip", "suggest", str(run)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "recommended: max_norm=" in done.stdout
