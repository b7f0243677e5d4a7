"""`shardclip-launch run` on this machine, with real ranks."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from shardclip.launch.devices import cpus, shared_core_warning

from shardclip.record.run_file import read
from tests.processes import status_of
from tests.waiting import PATIENCE_S, text_of, wait_for

HERE = Path(__file__).parent
pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(900)]


@pytest.fixture
def start(tmp_path, leftovers):
    """Start the launcher in a directory of its own."""
    processes = []

    def launch(*words, script=("ranks.py",), **environ):
        clean = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        where = {"SHARDCLIP_RUN_DIR": str(tmp_path / "run"), leftovers.variable: "1"}
        command = [sys.executable, "-m", "shardclip.launch", "run", *words]
        process = subprocess.Popen(
            [*command, HERE / script[0], *script[1:]],
            cwd=tmp_path, env=clean | where | environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        processes.append(process)
        return process

    yield launch
    for process in processes:
        process.kill()
        # whoever is left holds the pipes
        leftovers.kill()
        process.communicate()


def log(tmp_path, rank):
    return tmp_path / "run" / f"{os.uname().nodename}-rank{rank}-restart0.log"


def wait_for_text(path, text):
    wait_for(lambda: text in text_of(path), lambda: f"no {text!r} in {path}: {text_of(path)}")


def up(leftovers, tmp_path, ranks=2):
    """Wait until the ranks of a plain run are up; process ids of guards, and of ranks in order."""
    for rank in range(ranks):
        wait_for_text(log(tmp_path, rank), f"rank {rank} on")

    def both():
        seen = leftovers.processes()
        guards = [pid for pid, words in seen if "shardclip.launch.guard" in words]
        scripts = [pid for pid, words in seen if f"-u {HERE}" in words]
        return len(guards) == len(scripts) == ranks and (guards, scripts)

    return wait_for(both, leftovers.processes)


@pytest.mark.parametrize(
    ("does", "ends"),
    [
        ("exit", (7, "exited with code 7")),
        ("kill", (137, "was killed by SIGKILL")),
        ("raise", (1, "exited with code 1")),
    ],
)
def test_exit_code_is_the_first_failing_ranks(start, tmp_path, leftovers, does, ends):
    code, said = ends
    process = start("-n", "2", script=("ranks.py", does, "1"))
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert output == "rank 0 sum 2\n"
    # rank 0's follow-up error is shown, but does not stand last
    assert not re.search(r"^[EW]\d{4} ", errors, re.MULTILINE), errors
    last = errors[errors.index("shardclip-launch: first failure") :]
    assert last.startswith(f"shardclip-launch: first failure: rank 1 on {os.uname().nodename} ")
    assert said in last
    assert "rank0" not in last
    if does == "raise":
        assert "ValueError: the root cause" in last
    assert (tmp_path / "run" / "exit-code").read_text() == f"{code}\n"
    leftovers.assert_none()


def test_term_is_a_notice_and_saved_ranks_exit_0(start, tmp_path, leftovers):
    process = start("-n", "2", script=("ranks.py", "sum", "0"))
    wait_for_text(log(tmp_path, 1), "sum 2")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=PATIENCE_S)
    few = shared_core_warning(cpus(), 2)
    assert (process.returncode, errors) == (0, f"shardclip-launch: {few}\n" if few else "")
    steps = re.search(r"stops at step (\d+)", output)
    assert steps
    # the other rank stopped at the same step
    assert f"stops at step {steps[1]}" in log(tmp_path, 1).read_text()
    assert (tmp_path / "run" / "stopped").read_text() == f"{steps[1]}\n"
    assert (tmp_path / "run" / "stop").exists()
    leftovers.assert_none()


def test_files_of_an_earlier_run_in_the_same_directory_are_not_this_runs(
    start, tmp_path, leftovers
):
    for expected in ("stops at step", "sum 1\n"):
        process = start("-n", "1", script=("ranks.py", "sum", "0"), RANKS_STEPS="50")
        wait_for_text(log(tmp_path, 0), "sum 1")
        if "stops" in expected:
            process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
        assert expected in output
        log(tmp_path, 0).unlink()
    assert "stops" not in output
    assert not (tmp_path / "run" / "stop").exists()
    assert not (tmp_path / "run" / "stopped").exists()
    leftovers.assert_none()


def test_usr1_while_ranks_import_is_not_lost(start, tmp_path, leftovers):
    process = start("-n", "2", "--tee", "all", script=("ranks.py", "import-slowly", "0"))
    wait_for_text(log(tmp_path, 0), "importing")
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    host = os.uname().nodename
    assert f"{host}:0 rank 0 stops at step 0\n" in output
    assert f"{host}:1 rank 1 stops at step 0\n" in output
    leftovers.assert_none()


def test_ranks_that_do_not_stop_are_killed_after_the_grace_time(start, tmp_path, leftovers):
    process = start("-n", "1", "--grace", "2", script=("ranks.py", "plain", "1"))
    wait_for_text(log(tmp_path, 0), "rank 0")
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - begin >= 2
    # the launcher itself would give up only 15 s later, and say otherwise
    assert "did not stop within 2 s of SIGTERM" in errors
    leftovers.assert_none()


def test_sigkill_of_the_launcher_leaves_no_rank(start, tmp_path, leftovers):
    process = start("-n", "2", script=("ranks.py", "plain", "1"))
    up(leftovers, tmp_path)
    process.kill()
    process.wait()
    leftovers.assert_none()


def test_sigkill_of_a_guard_ends_its_rank(start, tmp_path, leftovers):
    process = start("-n", "2", script=("ranks.py", "plain", "1"))
    guards, ranks = up(leftovers, tmp_path)
    (own,) = [rank for rank in ranks if status_of(rank, "PPid") == str(guards[0])]
    # its rank ends with it, without the launcher, which cannot do a thing meanwhile
    process.send_signal(signal.SIGSTOP)
    os.kill(guards[0], signal.SIGKILL)
    wait_for(lambda: own not in dict(leftovers.processes()), leftovers.processes, 60)
    assert set(ranks) - set(dict(leftovers.processes())) == {own}
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 137
    assert "guard was killed by SIGKILL" in errors
    leftovers.assert_none()


def test_children_of_a_failed_rank_are_ended(start, leftovers):
    process = start("-n", "1", script=("ranks.py", "orphan", "0"), RANKS_STEPS="0")
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    # a child of a rank that ended well may go on (an uploader): that is the script's own
    wait_for(lambda: len(leftovers.processes()) == 1, leftovers.processes)
    ((_, words),) = leftovers.processes()
    assert "time.sleep(600)" in words


def test_alone_without_a_launcher(tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "ranks.py", "sum", "0"],
        env=os.environ | {"RANKS_STEPS": "0", "SLURM_PROCID": "0"},
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "rank 0 sum 1\n")


def test_stopped_twice_the_demo_resumes_with_the_same_losses(start, tmp_path, leftovers):
    """By USR1 in one run and by TERM in the other; bit for bit."""
    example = HERE.parents[1] / "examples" / "train_lm.py"

    def train(out, stop_at=None, number=None):
        words = ["--steps=40", "--files=40", "--batch=1", "--checks=0", "--save-every=20"]
        process = start("-n", "2", script=(str(example), *words, "--out", out))
        if stop_at:
            wait_for_text(log(tmp_path, 0), stop_at)
            process.send_signal(number)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
        for name in ("stop", log(tmp_path, 0).name):
            (tmp_path / "run" / name).unlink(missing_ok=True)
        return output

    def results(out):
        runs = [read(tmp_path / out / f"{name}.jsonl") for name in ("unclipped", "clipped")]
        steps = [step for run in runs for step in run.steps]
        return [replace(step, time=0.0, sums=step.sums | {"stop": 0.0}) for step in steps]

    whole = train("whole")
    assert not (tmp_path / "run" / "stopped").exists()
    at = []
    for words, number in (
        ("unclipped    4/40", signal.SIGUSR1),
        ("clipped      4/40", signal.SIGTERM),
    ):
        stopped = train("parts", words, number)
        assert "picture" not in stopped
        at.append(int((tmp_path / "run" / "stopped").read_text()))
        (tmp_path / "run" / "stopped").unlink()
    assert 4 <= at[0] < at[1] < 80
    resumed = train("parts")
    assert len(results("whole")) == 80
    assert results("parts") == results("whole")
    validation = "validation loss.*"
    assert re.findall(validation, resumed) == re.findall(validation, whole)
    # what was saved is not needed any more
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == [
        "clipped.jsonl",
        "report.html",
        "training.png",
        "unclipped.jsonl",
    ]
    leftovers.assert_none()


def test_ipv6_head_address(start, leftovers):
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    process = start(
        "-n", "2", "--master-addr", "::1", script=("ranks.py", "sum", "0"), RANKS_STEPS="0"
    )
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (0, "rank 0 sum 2\n"), errors
    leftovers.assert_none()


def test_mpirun_like_ranks_find_each_other(tmp_path, leftovers):
    """Open MPI's variables, and a port that rank 0 publishes."""
    processes = []
    for rank in range(2):
        environ = os.environ | {
            leftovers.variable: "1",
            "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "SLURM_PROCID": str(rank), "SHARDCLIP_RUN_DIR": str(tmp_path), "RANKS_STEPS": "0",
        }  # fmt: skip
        processes.append(
            subprocess.Popen(
                [sys.executable, HERE / "ranks.py", "sum", "0"],
                env=environ,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert outputs == ["rank 0 sum 2\n", "rank 1 sum 2\n"]


def test_check_on_this_machine(tmp_path, leftovers):
    done = subprocess.run(
        [sys.executable, "-m", "shardclip.launch", "check", "-n", "2", "--json"],
        cwd=tmp_path, env=os.environ | {leftovers.variable: "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    checks = {finding["check"]: finding for finding in report["checks"]}
    assert [facts["rank"] for facts in report["ranks"]] == [0, 1]
    assert (done.returncode, report["ok"]) == (0, True)
    assert all(finding["ok"] for finding in checks.values()), checks
    assert "sharded equals single process" in checks["gradient norm"]["text"]
    leftovers.assert_none()
