"""The benchmarks, small, as a user starts them. Counts are gated; times never are."""

import json

import pytest

from benchmarks import cases, report
from benchmarks.cases import LLAMA_8B, LLAMA_70B, LLAMA_405B, SHAPES
from benchmarks.measuring import quartiles
from tests.programs.starting import records, run, widest

pytestmark = pytest.mark.timeout(900)
SHARED = pytest.mark.xdist_group("quick run")  # else each worker makes one


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick run: what it printed, and its file."""
    path = tmp_path_factory.mktemp("quick") / "rows.jsonl"
    return run("-m", "benchmarks", "--quick", "--out", str(path)), path


@SHARED
def test_every_layout_is_measured(quick):
    printed, path = quick
    measured = [row for row in records(path) if row["kind"] == "clip"]
    assert {row["case"] for row in measured} == set(cases.QUICK)
    assert widest(printed, path) <= 80
    for name in cases.QUICK:
        assert f"{name}: " in printed
    for row in measured:
        assert row["norm_error"] < (1e-2 if "16" in row["dtype"] else 1e-5), row
        assert {"commit", "torch", "processor", "seed", "time"} <= row.keys()
        assert len(row["seconds"]) == (1 if row["step"] == "first" else 2)


@SHARED
def test_one_all_reduce_and_no_host_sync_in_any_layout(quick):
    rows = [row for row in records(quick[1]) if row["kind"] == "clip"]
    ours = [row for row in rows if row["contender"].startswith(("GradClipper", "shardclip"))]
    assert len(ours) > 40
    for row in ours:
        expected = 0 if row["ranks"] == 1 else 1
        assert row["counts"]["all_reduces"] == row["counts"]["collectives"] == expected, row
        assert row["norm_error"] < 1e-6, row
        if row["step"] == "usual" and row["contender"].startswith("GradClipper"):
            only_here = row["contender"] in ("GradClipper.step(AdamW)", "GradClipper(exact=True)")
            assert row["host_syncs"] == (None if only_here else 0), row


@SHARED
def test_who_is_left_out_is_named_with_the_reason(quick):
    printed, path = quick
    absent = {(r["case"], r["contender"]): r for r in records(path) if r["kind"] == "absent"}
    reason = absent["two-meshes/llama-stack", "torch clip_grad_norm_"]["reason"]
    assert "same mesh" in reason
    assert "torch clip_grad_norm_ left out: raises RuntimeError" in printed


def test_records_are_added_never_overwritten(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"kind": "kept"}\n')
    run("-m", "benchmarks", "--quick", "--case", "plain/layers", "--out", str(path))
    rows = records(path)
    assert rows[0] == {"kind": "kept"}
    assert len(rows) > 5


@SHARED
def test_plans_of_many_ranks_and_a_report_of_it_all(tmp_path, quick):
    out = tmp_path / "scale.jsonl"
    printed = run("-m", "benchmarks.scale", "--ranks", "64", "--out", str(out))
    assert widest(printed, out) <= 80
    rows = records(out)
    planned = [row for row in rows if row["kind"] == "planning"]
    assert [row["ranks"] for row in planned] == [8, 64]
    assert all(row["parameters"] == 80 * 9 + 3 for row in planned)
    for row in planned:
        assert row["most"] <= 1.05 * row["fair"] + 64 * 1024
    assert {row["kind"] for row in rows} == {"planning", "modelled latency"}
    for line in printed.splitlines():
        assert "microseconds" not in line or line.startswith("MODELLED")

    results = tmp_path / "RESULTS.md"
    made = [str(quick[1]), str(out)]
    run("-m", "benchmarks.report", *made, "--out", str(results))
    first = results.read_text()
    assert "modelled, not measured" in first
    pictures = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert "latency-modelled.png" in pictures
    assert all(f"pictures/{name}" in first for name in pictures)
    run("-m", "benchmarks.report", *made, "--out", str(results))
    assert results.read_text() == first


def test_the_gpu_script_runs_dry(tmp_path):
    out = tmp_path / "gpu.jsonl"
    # seconds in which it may start a case; on a slow machine the checks alone take long
    words = ["--device", "cpu", "--seconds", "3600", "--out", str(out)]
    printed = run("-m", "benchmarks.gpu", *words)
    assert widest(printed, out) <= 80
    rows = records(out)
    checks = [row for row in rows if row["kind"] == "gpu check"]
    assert [row["name"] for row in checks if row["passed"] is False] == []
    assert sum(row["passed"] is True for row in checks) >= 9
    assert {row["what"] for row in rows if row["kind"] == "gpu time"} == {
        "norm", "function", "usual", "clipped", "step",
    }  # fmt: skip
    report_text = report.report(report.latest(rows), {})
    assert "No record from a GPU yet" in report_text  # a dry run is none


def test_without_a_gpu_the_script_says_what_to_do():
    assert not run("-m", "benchmarks.gpu", "--seconds", "0", code=2)


@pytest.mark.parametrize(
    "name, said",
    [
        ("fsdp3/layers", "layout 'fsdp3' is none of plain, "),
        ("fsdp2/nothing", "shapes 'nothing' is none of layers, "),
        ("fsdp2/layers/fp8", "dtype 'fp8' is none of fp32, "),
        ("hsdp/layers@3", "needs an even number of ranks"),
        ("plain/layers@2", "has one rank"),
        ("fsdp1/layers/bf16", "fp32 alone"),
    ],
)
def test_a_case_that_is_none_is_rejected(name, said):
    with pytest.raises(ValueError, match=said):
        cases.parse(name)


@pytest.mark.parametrize("name", dict.fromkeys((*cases.ALL, *cases.QUICK, *cases.TARGETED)))
def test_names_of_cases_are_read_back(name):
    assert cases.parse(name).name == name


def test_models_have_their_published_sizes():
    assert LLAMA_8B.elements == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_70B.elements == pytest.approx(70.6e9, rel=1e-3)
    assert LLAMA_405B.elements == pytest.approx(405.9e9, rel=1e-3)
    assert SHAPES["gpt2-small"].elements == pytest.approx(124.4e6, rel=1e-3)
    stages = [LLAMA_70B.stage(index, 8) for index in range(8)]
    assert sum(map(len, stages)) == len({name for stage in stages for name in stage}) == 723


def test_of_a_measurement_the_latest_record_counts():
    row = {"kind": "planning", "model": "m", "mesh": "1", "time": "2", "lanes": 2}
    older = json.loads(json.dumps(row | {"time": "1", "lanes": 1}))
    assert report.latest([older, row]) == [row]


def test_quartiles():
    assert quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == [2.0, 3.0, 4.0]
    assert quartiles([7.0]) == [7.0, 7.0, 7.0]
    assert quartiles([]) == [0.0, 0.0, 0.0]
