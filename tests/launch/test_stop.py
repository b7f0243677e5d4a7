import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from shardclip.launch import StopSignal
from shardclip.launch.errors import LaunchError

from tests.processes import has_signal
from tests.waiting import PATIENCE_S, wait_for


@pytest.fixture
def stop(tmp_path):
    with StopSignal(stop_file=tmp_path / "stop", marker=tmp_path / "stopped") as made:
        yield made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_one_notice_however_often_it_comes(stop, number):
    assert stop.flag == 0
    os.kill(os.getpid(), number)
    wait_for(lambda: stop.flag)
    os.kill(os.getpid(), number)
    wait_for(lambda: number not in signal.sigpending())  # it has been delivered
    assert stop.flag == 1


def test_a_stop_file_is_a_notice(stop, tmp_path):
    assert stop.flag == 0
    (tmp_path / "stop").touch()
    assert stop.flag == 1
    (tmp_path / "stop").unlink()
    assert stop.flag == 1


def test_one_rank_a_host_looks_at_the_file(tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "stop").touch()
    with StopSignal(stop_file=tmp_path / "stop") as stop:
        assert stop.flag == 0


def test_rank_0_leaves_the_marker(tmp_path, monkeypatch):
    marker = tmp_path / "stopped"
    for rank in ("1", "0"):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        with StopSignal(marker=marker) as stop:
            assert not marker.exists()
            stop.mark(27)
    assert marker.read_text() == "27\n"
    assert [path.name for path in tmp_path.iterdir()] == ["stopped"]


def test_without_a_launcher_mark_does_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("SHARDCLIP_STOP_MARKER", raising=False)
    monkeypatch.chdir(tmp_path)
    with StopSignal() as stop:
        stop.mark(1)
    assert list(tmp_path.iterdir()) == []


def test_former_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with StopSignal():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_children_survive_usr1_and_end_by_term(stop):
    is_up, says_so = os.pipe()
    code = f"import os, time; os.write({says_so}, b'.'); time.sleep(600)"
    spawned = subprocess.Popen([sys.executable, "-c", code], pass_fds=[says_so])
    forked = os.fork()
    if forked == 0:
        os.write(says_so, b".")
        time.sleep(600)
        os._exit(1)
    try:
        for _ in range(2):
            os.read(is_up, 1)
        for pid in (spawned.pid, forked):
            os.kill(pid, signal.SIGUSR1)
            # it waits, and ends nobody; of one that has ended a process nothing would be pending
            assert has_signal(pid, "SigBlk", signal.SIGUSR1)
            assert has_signal(pid, "ShdPnd", signal.SIGUSR1)
    finally:
        spawned.terminate()
        os.kill(forked, signal.SIGTERM)
        os.close(is_up)
        os.close(says_so)
    assert spawned.wait(PATIENCE_S) == -signal.SIGTERM
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == -signal.SIGTERM
    assert stop.flag == 0


def test_a_notice_while_python_ends_does_no_harm(tmp_path):
    """Slurm's second TERM may come after all is saved; here it comes at the worst moment."""
    code = (
        "import os, signal, sys\n"
        "from shardclip.launch import StopSignal\n"
        "StopSignal()\n"
        "class Late:\n"
        "    kill, pid, number = os.kill, os.getpid(), signal.SIGTERM\n"
        "    def __del__(self):\n"
        "        self.kill(self.pid, self.number)\n"
        "sys.late = Late()\n"  # dies with the interpreter, after the handlers
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S)
    assert done.returncode == 0


def test_agree_without_a_process_group(stop, tmp_path):
    assert not stop.agree()
    (tmp_path / "stop").touch()
    assert stop.agree()


def test_unknown_signal_is_rejected():
    with pytest.raises(LaunchError, match="'NOPE' is no signal"):
        StopSignal(signals=["NOPE"])


def test_another_thread_is_rejected():
    caught = []

    def make():
        try:
            StopSignal()
        except LaunchError as error:
            caught.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]
