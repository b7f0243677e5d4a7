"""The launcher on a real Slurm cluster of three nodes, each a host of its own."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardclip.record.run_file import read
from tests.waiting import PATIENCE_S, text_of, wait_for

HERE = Path(__file__).parent
RANKS = HERE / "ranks.py"
TRAIN_LM = HERE.parents[1] / "examples" / "train_lm.py"
RESUMABLE = HERE / "resumable.py"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.xdist_group("cluster"),
    pytest.mark.timeout(1200),
]


def losses(text):
    return re.findall(r"step \d+ loss \S+", text)


def recorded(out):
    runs = [read(out / f"{name}.jsonl") for name in ("unclipped", "clipped")]
    assert not [note for run in runs for note in run.notes]  # none was trained twice
    return [run.steps for run in runs]


def last_report(output):
    return output[output.rindex("shardclip-launch: first failure") :]


def test_check(job, leftovers):
    words = [sys.executable, "-m", "shardclip.launch", "check", "-n", "2", "--json"]
    done = job.login("salloc", "-N2", "--ntasks-per-node=1", *words, check=False)
    report = json.loads(done.stdout)
    seen = [(facts["rank"], facts["host"], facts["local_rank"]) for facts in report["ranks"]]
    assert seen == [(0, "n1", 0), (1, "n1", 1), (2, "n2", 0), (3, "n2", 1)]
    checks = {finding["check"]: finding for finding in report["checks"]}
    assert all(finding["ok"] for finding in checks.values()), checks
    assert "reached from 2 host(s)" in checks["head address"]["text"]
    norms = [facts["gradient_norm"] for facts in report["ranks"]]
    assert all(abs(seen["norm"] / seen["reference"] - 1) < 1e-6 for seen in norms), norms
    assert (done.returncode, report["ok"]) == (0, True)
    leftovers.assert_none()


def test_check_names_the_host_that_does_not_answer(job, leftovers):
    python = f"{sys.executable} -m shardclip.launch check -n 1 --timeout 8"
    script = f"[ $SLURM_NODEID = 1 ] && exec sleep 600; exec {python}"
    begin = time.monotonic()
    done = job.login(
        "srun", "-N2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "bash", "-c", script,
        check=False,
    )  # fmt: skip
    assert time.monotonic() - begin < 240  # without the 8 s it waits for 300
    assert done.returncode != 0
    assert "host n2 did not join within 8 s" in done.stderr
    leftovers.assert_none()


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_demo_over_two_nodes_with_two_ranks_each(job, leftovers, tmp_path, launcher):
    small = ["--steps=6", "--files=40", "--batch=1", "--checks=2", "--out=demo"]
    job.submit("-N2", "-n2", f"--launcher={launcher}", TRAIN_LM, *small)
    assert job.wait() == ("COMPLETED", 0, 0), job.output
    assert job.output.startswith("FSDP2 on 4 cpu ranks")
    unclipped, clipped = recorded(tmp_path / "demo")
    assert (len(unclipped), len(clipped)) == (6, 6)
    assert job.output.count("gathered in float64") == 4  # it fails where one is too far off
    assert clipped[-1].clipped_norm == pytest.approx(0.5, rel=1e-4)
    assert job.output.endswith("picture: demo/training.png\n")
    logs = sorted(path.name for path in job.run_dir.glob("*.log"))
    assert logs == [f"n{n}-rank{2 * n - 2 + i}-restart0.log" for n in (1, 2) for i in (0, 1)]
    leftovers.assert_none()


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_exit_code_of_the_rank_that_failed_first(job, leftovers, launcher):
    job.submit("-N2", "-n2", f"--launcher={launcher}", RANKS, "exit", "3")
    assert job.wait() == ("FAILED", 7, 0)
    # the peers fail a second later with code 1, and srun ends with theirs
    assert last_report(job.output).startswith(
        "shardclip-launch: first failure: rank 3 on n2 exited with code 7\n"
    )
    leftovers.assert_none()


def test_traceback_of_the_rank_that_failed_first_stands_last(job, leftovers):
    job.submit("-N2", "-n1", RANKS, "raise", "1")
    assert job.wait()[:2] == ("FAILED", 1)
    report = last_report(job.output)
    assert report.startswith("shardclip-launch: first failure: rank 1 on n2 exited with code 1\n")
    assert "ValueError: the root cause" in report
    assert "rank0" not in report
    leftovers.assert_none()


def test_a_killed_rank(job, leftovers):
    job.submit("-N2", "-n1", RANKS, "kill", "0")
    assert job.wait() == ("FAILED", 137, 0)
    assert "rank 0 on n1 was killed by SIGKILL" in last_report(job.output)
    leftovers.assert_none()


def test_preempted_the_demo_saves_is_requeued_and_resumes(job, leftovers, tmp_path):
    small = ["--steps=100", "--files=40", "--batch=1", "--checks=0", "--out=demo"]
    job.submit("-N3", "-n1", TRAIN_LM, *small)
    job.wait_for("unclipped   10/100")
    job.login("srun", "--partition=urgent", "-N3", "--exclusive", "sleep", "1")
    state, code, restarts = job.wait(600)
    assert (state, code) == ("COMPLETED", 0), job.output
    assert restarts >= 1
    saved = re.search(r"^preempted: stopped at step (\d+); requeue 1 of 3$", job.output, re.M)
    assert saved
    assert 10 <= int(saved[1]) < 200
    # no step is missing, none was trained twice; test_run.py shows that the losses are the same
    for steps in recorded(tmp_path / "demo"):
        assert [step.step for step in steps] == list(range(1, 101))
    assert "picture: demo/training.png" in job.output
    leftovers.assert_none()


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_cancelled_job_stays_cancelled(job, leftovers, launcher):
    job.submit("-N2", "-n1", f"--launcher={launcher}", RANKS, "sum", "0")
    job.wait_for("rank 0 sum 2")
    job.login("scancel", job.id)
    assert job.wait()[::2] == ("CANCELLED", 0), job.output
    # the ranks stopped as those of a preempted job do
    assert (job.run_dir / "stopped").exists()
    said = r"^the job was cancelled \(\w+\): stopped at step \d+; not requeued by this script$"
    assert re.search(said, job.output, re.M), job.output
    leftovers.assert_none()


def test_a_cancelled_task_of_an_array_stays_so_and_the_other_goes_on(job, leftovers):
    array = job.submit("-N1", "-n1", "--array=1-2", RANKS, "sum", "0", RANKS_STEPS="60").id
    for job.id in (f"{array}_1", f"{array}_2"):
        job.wait_for("rank 0 sum 1")
    job.login("scancel", job.id)
    assert job.wait()[::2] == ("CANCELLED", 0), job.output
    assert "the job was cancelled" in job.output
    job.id = f"{array}_1"
    assert job.wait() == ("COMPLETED", 0, 0), job.output
    assert "stop" not in job.output
    leftovers.assert_none()


def test_term_by_hand_is_no_preemption(job, leftovers):
    job.submit("-N2", "-n1", RANKS, "sum", "0")
    job.wait_for("rank 0 sum 2")
    job.login("scancel", "--signal=TERM", job.id)
    assert job.wait() == ("FAILED", 75, 0), job.output
    assert "sent TERM by hand: stopped at step" in job.output
    leftovers.assert_none()


def test_preempted_without_a_grace_time_slurm_itself_requeues(job, leftovers):
    job.login("scontrol", "update", "PartitionName=batch", "GraceTime=0")
    try:
        job.submit("-N3", "-n1", RANKS, "sum", "0", RANKS_STEPS="50")
        job.wait_for("rank 0 sum 3")
        job.login("srun", "--partition=urgent", "-N3", "--exclusive", "sleep", "1")
        assert job.wait() == ("COMPLETED", 0, 1), job.output
    finally:
        job.login("scontrol", "update", "PartitionName=batch", "GraceTime=180")
    assert "Slurm itself starts the job again: stopped at step" in job.output
    assert job.output.count("rank 0 sum 3") == 2
    leftovers.assert_none()


def test_the_notice_before_the_time_limit(job, leftovers):
    job.submit("-N2", "-n1", "--time=1", "--grace=50", "--max-requeues=0", RANKS, "sum", "0")
    assert job.wait() == ("FAILED", 75, 0), job.output
    assert re.search(r"^told by USR1, time limit \S+: stopped at step \d+; ", job.output, re.M)
    leftovers.assert_none()


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_usr1_while_ranks_import_and_the_requeue_limit(job, leftovers, launcher):
    job.submit(
        "-N2", "-n1", f"--launcher={launcher}", "--max-requeues=0", RANKS, "import-slowly", "0"
    )
    # all of them: before it has started, a guard cannot hold back the signal that ends it
    job.wait_for_ranks("importing", "n1-rank0", "n2-rank1")
    job.login("scancel", "--signal=USR1", job.id)
    assert job.wait() == ("FAILED", 75, 0)
    assert "rank 0 stops at step 0\n" in job.output
    assert "stopped at step 0; requeued 0 times, the limit: submit again" in job.output
    leftovers.assert_none()


def test_usr1_to_the_batch_shell_alone(job, leftovers):
    job.submit("-N2", "-n1", "--max-requeues=0", RANKS, "sum", "0")
    job.wait_for("rank 0 sum 2")
    job.login("scancel", "--batch", "--signal=USR1", job.id)
    assert job.wait() == ("FAILED", 75, 0)
    assert re.search(r"rank 0 stops at step \d+\n", job.output)
    assert (job.run_dir / "stop").exists()
    leftovers.assert_none()


def test_a_node_loses_power_and_the_job_goes_on_elsewhere(job, minicluster, leftovers):
    job.submit(
        "-N2", "-n1", RESUMABLE, "--steps=25", "--pause=0.3", "--save-every=5", "--checkpoint=ck",
        "--timeout=300",
    )  # fmt: skip
    job.wait_for("step 6 ")
    minicluster("node-kill", "n2")
    try:
        assert job.wait() == ("COMPLETED", 0, 1), job.output
    finally:
        minicluster("node-start", "n2")
    assert job.output.endswith("done\n")
    assert len(set(losses(job.output))) == 25
    restarted = sorted(path.name for path in job.run_dir.glob("*restart1.log"))
    assert restarted == ["n1-rank0-restart1.log", "n3-rank1-restart1.log"]
    leftovers.assert_none()


def test_an_occupied_port_is_named(job, minicluster, leftovers):
    listen = "import socket, time; s = socket.create_server(('', 29511)); time.sleep(1000)"
    holder = minicluster.popen("on", "n1", sys.executable, "-c", listen)
    try:
        wait_until_listening(minicluster, "n1", 29511)
        done = job.login(
            "srun", "-N2", "--ntasks-per-node=1", "--kill-on-bad-exit=1",
            sys.executable, "-m", "shardclip.launch", "run", "-n1", "--master-port=29511",
            "--join-timeout=20", RANKS, "sum", "0", check=False,
        )  # fmt: skip
        assert done.returncode != 0
        assert "port 29511 on n1 cannot be bound" in done.stderr
        # without a port one is found and published, whatever others listen on
        job.submit("-N2", "-n1", RANKS, "sum", "0", RANKS_STEPS="1")
        assert job.wait() == ("COMPLETED", 0, 0)
    finally:
        minicluster("on", "n1", "bash", "-c", "kill $(ss -tlnpH 'sport = :29511' | "
                    "grep -o 'pid=[0-9]*' | cut -d= -f2)", check=False)  # fmt: skip
        holder.wait(PATIENCE_S)
    leftovers.assert_none()


def wait_until_listening(minicluster, node, port):
    def listens():
        return minicluster("on", node, "ss", "-tlnH", f"sport = :{port}").stdout.strip()

    wait_for(listens, lambda: f"nothing listens on {node}:{port}")


def test_started_by_srun_alone_a_port_is_published(job, leftovers):
    done = job.login(
        "srun", "-N2", "--ntasks-per-node=2", sys.executable, RANKS, "sum", "0", RANKS_STEPS="0"
    )
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} sum 4" for rank in range(4)]
    leftovers.assert_none()


def test_several_launchers_a_host_are_refused(job):
    words = [sys.executable, "-m", "shardclip.launch", "run", RANKS, "sum", "0"]
    done = job.login("srun", "-N1", "--ntasks-per-node=2", *words, check=False)
    assert done.returncode == 2
    assert "would fight for one port" in done.stderr


def test_hostile_names_reach_slurm_and_the_ranks(job, leftovers, tmp_path):
    name = "a 'b' \"c\" $HOME `id`; #x\\y"
    script = tmp_path / 'it\'s $(touch pwned); "x".py'
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    words = ["two words", "$HOME", "a;b", "-n"]
    job.submit("-N1", "-n1", f"--job-name={name}", script, *words)
    shown = job.login("scontrol", "-o", "show", "job", job.id).stdout
    assert f"JobName={name} " in shown
    assert job.wait() == ("COMPLETED", 0, 0)
    assert job.output == f"{words!r}\n"
    assert not (tmp_path / "pwned").exists()
    leftovers.assert_none()


def test_following_a_job_ends_with_its_code(job, leftovers):
    done = job.launch(
        "slurm", "-N1", "-n1", "--time=5", f"--python={sys.executable}", "--wait", RANKS, "exit",
        "0", check=False, WITHOUT_TORCH="1",
    )  # fmt: skip
    assert done.returncode == 7
    assert "rank 0 on n1 exited with code 7" in done.stdout
    leftovers.assert_none()


@pytest.mark.parametrize(
    ("backend", "timeout", "host_timeout"),
    [("static", 15, 600), ("c10d", 15, 600), ("static", 600, 15)],
    ids=["static", "c10d", "host-timeout"],
)
def test_two_hosts_by_hand_and_the_link_is_cut(
    minicluster, leftovers, tmp_path, backend, timeout, host_timeout
):
    minicluster.drain()
    processes = [
        minicluster.popen(
            "on", f"n{node + 1}", "env", "-C", tmp_path, f"{leftovers.variable}=1",
            f"RANKS_TIMEOUT={timeout}", f"SHARDCLIP_RUN_DIR={tmp_path / str(node)}",
            sys.executable, "-m", "shardclip.launch", "run", "-n1", "--nnodes=2",
            f"--node-rank={node}", "--master-addr=n1", "--master-port=29512",
            f"--rdzv-backend={backend}", f"--host-timeout={host_timeout}", RANKS, "sum", "0",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in (0, 1)
    ]  # fmt: skip
    try:
        logs = [tmp_path / str(n) / f"n{n + 1}-rank{n}-restart0.log" for n in (0, 1)]
        wait_for(
            lambda: all("sum 2" in text_of(log) for log in logs), lambda: [*map(text_of, logs)]
        )
        minicluster("link", "n2", "down")
        # the shorter of the two limits counts: the other, and torch's own, are minutes
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        minicluster("link", "n2", "up")
        for process in processes:
            process.kill()
    code = 74 if host_timeout < timeout else 1
    assert [process.returncode for process in processes] == [code, code], outputs
    assert "host node 1 has not answered" in outputs[0]
    assert "host n1 (node 0) has not answered" in outputs[1]
    leftovers.assert_none()
