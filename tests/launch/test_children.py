"""A rank's children start as those of any program; notices wait until the rank listens."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

HERE = Path(__file__).parent
GUARD = [sys.executable, "-m", "shardclip.launch.guard"]
RUN = [sys.executable, "-m", "shardclip.launch", "run", "-n1"]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def start(tmp_path, leftovers):
    """Start a rank's script, given as text, by its guard alone as srun does."""
    processes = []

    def launch(text, **environ):
        script = tmp_path / "script.py"
        script.write_text(text)
        process = subprocess.Popen(
            [*GUARD, "--", script],
            cwd=tmp_path, env=os.environ | {leftovers.variable: "1"} | environ,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        return process

    yield launch
    for process in processes:
        process.kill()
        leftovers.kill()
        process.communicate()


def ended(process):
    output, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output, errors


def as_from_a_terminal():
    """Let these signals act: whoever runs the tests in the background may have them ignored."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def started(words, environ, folder, leftovers, tries=3):
    """Run a program; again where it hangs: Python's own pools rarely do so when they end."""
    how = {"cwd": folder, "env": environ, "capture_output": True, "preexec_fn": as_from_a_terminal}
    try:
        return subprocess.run(words, timeout=PATIENCE_S / 2, check=False, **how)
    except subprocess.TimeoutExpired:
        leftovers.kill()
        if tries == 1:
            raise
        return started(words, environ, folder, leftovers, tries - 1)


@pytest.mark.parametrize("by", [GUARD, RUN], ids=["srun", "torchrun"])
def test_children_start_and_end_as_without_a_launcher(by, tmp_path, leftovers):
    def children(name, *before):
        out = tmp_path / name
        words = [*before, HERE / "children.py", out, "torch"]
        environ = os.environ | {leftovers.variable: "1", "PYTHONPATH": "/somewhere"}
        done = started(words, environ, tmp_path, leftovers)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(out.read_text())

    plain = children("plain", sys.executable)
    assert children("rank", *by, "--") == plain
    for method in ("fork", "forkserver", "spawn"):
        masks, environ, code = plain[f"{method} process"]
        ignored = int(dict(masks)["SigIgn:"], 16)
        assert not ignored >> (signal.SIGTERM - 1) & 1
        assert (environ, code) == ({"PYTHONPATH": "/somewhere"}, -signal.SIGTERM)
        assert plain[f"{method} pool"] == [1, 2]
    assert plain["popen"][1] == -signal.SIGTERM
    leftovers.assert_none()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("sent_to", ["guard", "rank"])
def test_a_notice_while_a_rank_imports_is_seen_later(start, tmp_path, number, sent_to):
    process = start(
        "import os, time\n"
        "print('importing', os.getpid(), flush=True)\n"
        "while not os.path.exists('sent'): time.sleep(0.05)\n"
        "from shardclip.launch import StopSignal\n"
        "stop = StopSignal()\n"
        "while not stop.flag: time.sleep(0.05)\n"
        "print('stops')\n"
    )
    pid = int(process.stdout.readline().split()[1])
    # the scheduler may signal every process of a step, the rank too
    os.kill(process.pid if sent_to == "guard" else pid, number)
    (tmp_path / "sent").touch()
    assert ended(process) == (0, "stops\n", "")


def test_a_held_notice_reaches_the_handler_that_the_script_sets(start):
    process = start(
        "import os, signal, time\n"
        "for _ in range(3): os.kill(os.getpid(), signal.SIGUSR1)\n"
        "time.sleep(0.5)\n"
        "seen = []\n"
        "signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))\n"
        "while not seen: time.sleep(0.05)\n"
        "time.sleep(0.5)\n"
        "print(len(seen))\n"
    )
    assert ended(process) == (0, "1\n", "")


def test_a_script_that_does_not_listen_outlives_notices(start, tmp_path):
    process = start(
        "import os, signal, sys, time\n"
        "for number in (signal.SIGUSR1, signal.SIGTERM): os.kill(os.getpid(), number)\n"
        "time.sleep(0.5)\n"
        "print('trained')\n"
        "class Late:\n"
        "    kill, pid, number = os.kill, os.getpid(), signal.SIGTERM\n"
        "    def __del__(self):\n"
        "        self.kill(self.pid, self.number)\n"
        "sys.late = Late()\n"  # dies with the interpreter, after the handlers
    )
    assert ended(process) == (0, "trained\n", "")


def test_children_keep_what_the_script_set(start):
    """Handlers, what is ignored, and faulthandler's, of which Python's own table does not know."""
    process = start(
        "import faulthandler, os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.run(['bash', '-c', 'kill -TERM $$; echo ignored'], text=True,\n"
        "                     stdout=subprocess.PIPE).stdout, end='', flush=True)\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('handled', flush=True))\n"
        "faulthandler.register(signal.SIGUSR1, sys.stdout)\n"
        "if os.fork() == 0:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    os._exit(0)\n"
        "print(os.wait()[1])\n"
    )
    code, output, _ = ended(process)
    lines = output.splitlines()
    assert (code, lines[:2], lines[-1]) == (0, ["ignored", "handled"], "0")
    assert any(line.startswith("Current thread") for line in lines)


def test_the_users_own_sitecustomize_is_imported(start, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os, sys\nsys.own = os.environ['PYTHONPATH']\n")
    process = start("import sys; print(sys.own, sys.path.count(sys.own))", PYTHONPATH=str(own))
    assert ended(process) == (0, f"{own} 1\n", "")


def test_a_program_is_told_once_it_listens(start, tmp_path):
    """No Python, so nothing can hold a notice back inside; its children are as any program's."""
    text = (
        "grep SigIgn /proc/self/status; echo up; while [ ! -e sent ]; do sleep 0.1; done\n"
        "sleep 0.5; trap 'echo noticed; exit 0' USR1; while :; do sleep 0.1; done\n"
    )
    (tmp_path / "wrapper.sh").write_text(text)
    process = subprocess.Popen(
        [*GUARD, "--program", "--", "bash", "wrapper.sh"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        ignored = int(process.stdout.readline().split()[1], 16)
        assert not ignored >> (signal.SIGTERM - 1) & 1
        assert not ignored >> (signal.SIGUSR1 - 1) & 1
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGUSR1)
        (tmp_path / "sent").touch()
        assert process.communicate(timeout=PATIENCE_S)[0] == "noticed\n"
        assert process.returncode == 0
    finally:
        process.kill()
