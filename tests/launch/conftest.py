"""The three-node cluster, started once, and the search for processes that a test left."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.waiting import text_of, wait_for

HERE = Path(__file__).parent
REQUIRED = "SHARDCLIP_REQUIRE_CLUSTER"
PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "unshare", "nsenter")
LAUNCHERS = ("SLURM", "OMPI_", "PMI", "PALS_", "MPI_LOCAL", "PET_", "MASTER_", "TORCHELASTIC_",
             "SHARDCLIP_", "GROUP_")  # fmt: skip
RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
SHARED_CORE = re.compile(r"^shardclip-launch: \d+ ranks share .*\n", re.MULTILINE)
"""The launcher's warning where there are fewer cores than ranks."""


@pytest.fixture(autouse=True)
def _outside_of_any_launcher(monkeypatch):
    """As if the tests were started by hand on a host without devices, wherever they run."""
    for name in list(os.environ):
        if (name.startswith(LAUNCHERS) and name != REQUIRED) or name in RANKS:
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def why_not():
    """Say why no cluster can be started here, or None."""
    if os.geteuid() != 0:
        return "only root can start the Slurm cluster"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return (
            f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge iproute2"
        )
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], check=False)
    return "namespaces are not allowed here" if tried.returncode else None


class Leftovers:
    """Finds the processes of one test by a variable that they inherit."""

    def __init__(self):
        self.variable = f"SHARDCLIP_TEST_{uuid.uuid4().hex}"

    def processes(self):
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            # a process may end while it is looked at
            with contextlib.suppress(OSError):
                if self.variable.encode() in (path / "environ").read_bytes():
                    words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if words:
                        found.append((int(path.name), words))
        return found

    def kill(self):
        def none_is_left():
            found = self.processes()
            for pid, _ in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            return not found

        # again and again: one may start another before it dies
        wait_for(none_is_left, self.processes)

    def assert_none(self):
        """Wait until all have ended; left alone, the ranks of these tests run for longer."""
        wait_for(lambda: not self.processes(), self.processes, 60)


@pytest.fixture
def leftovers():
    made = Leftovers()
    yield made
    made.kill()


class Cluster:
    """Runs commands on the cluster's login side and nodes."""

    def __init__(self, root):
        outer = (*LAUNCHERS, "GLOO_", "NCCL_")  # its nodes have other interfaces than this host
        clean = {k: v for k, v in os.environ.items() if not k.startswith(outer) and k not in RANKS}
        self._environ = clean | {
            "MC_ROOT": str(root), "MC_SUBNET": "10.178.0", "CUDA_VISIBLE_DEVICES": "",
            # a preempted job has all the time it needs to save; it is over as soon as it has
            "MC_GRACE": "180",
            # and so has one that is cancelled
            "MC_KILLWAIT": "30",
            # requeued jobs wait for this, and a job's start must not take longer
            "MC_REQUEUE_DELAY": "10",
            # well below the launcher's 60 s without an answer: Slurm is to notice a dead node first
            "MC_SLURMD_TIMEOUT": "15",
        }  # fmt: skip
        self.root = root

    def __call__(self, *words, check=True, timeout=300):
        done = subprocess.run(
            ["bash", HERE / "minicluster.sh", *map(str, words)],
            env=self._environ, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{words}: {done.stdout}{done.stderr}")
        return done

    def popen(self, *words, **how):
        return subprocess.Popen(
            ["bash", HERE / "minicluster.sh", *map(str, words)], env=self._environ, **how
        )

    def drain(self):
        """End all jobs and bring dead nodes back, for the next test."""
        self("exec", "scancel", "--full", "--user=root", check=False)
        for node in ("n1", "n2", "n3"):
            self("link", node, "up", check=False)

        def is_idle():
            asked = self("exec", "squeue", "-h", check=False)
            if asked.returncode or asked.stdout.strip():
                return False
            words = ("sinfo", "-h", "-N", "-p", "batch", "-t", "idle", "-o", "%N")
            return len(set(self("exec", *words, check=False).stdout.split())) == 3

        wait_for(is_idle, lambda: self("status", check=False).stdout)


@pytest.fixture(scope="session")
def minicluster(tmp_path_factory):
    reason = why_not()
    if reason:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, but {reason}")
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("cluster") / "root"
    made = Cluster(root)
    started = made("start", "3", check=False)
    if started.returncode:
        made("stop", check=False)
        pytest.fail(f"the cluster did not start: {started.stdout}{started.stderr}")
    yield made
    made("stop")


class Job:
    """A job submitted through `shardclip-launch slurm`, in a directory of its own."""

    def __init__(self, cluster, path, leftovers):
        self._cluster, self._path, self._leftovers = cluster, path, leftovers
        self.id = None

    def login(self, *words, check=True, **environ):
        settings = [f"{k}={v}" for k, v in environ.items()]
        where = ["bash", "-c", 'cd "$0" && exec "$@"', self._path]
        variable = f"{self._leftovers.variable}=1"
        return self._cluster(
            "exec", *where, "env", variable, "OMP_NUM_THREADS=1", *settings, *words, check=check
        )

    def launch(self, *words, check=True, **environ):
        return self.login(sys.executable, "-m", "shardclip.launch", *words, check=check, **environ)

    def submit(self, *words, **environ):
        # with the notice that comes 120 s before the end: it must not, on any machine
        done = self.launch("slurm", "--time=30", f"--python={sys.executable}", *words, **environ)
        self.id = done.stdout.strip()
        assert self.id.isdigit(), done.stderr
        return self

    def wait(self, seconds=400):
        """Return the final state, exit code and number of restarts."""
        done = self._cluster("wait", self.id, seconds, check=False, timeout=seconds + 60)
        assert "ExitCode=" in done.stdout, f"{done.stdout}{done.stderr}{self.output}"
        state, code, restarts = done.stdout.split()
        code = code.removeprefix("ExitCode=").split(":")[0]
        return state, int(code), int(restarts.removeprefix("Restarts="))

    @property
    def output(self):
        return SHARED_CORE.sub("", text_of(self._path / f"slurm-{self.id}.out"))

    @property
    def run_dir(self):
        return self._path / "shardclip-runs" / self.id

    def wait_for(self, text):
        """Wait until the job's output holds the text."""
        wait_for(lambda: text in self.output, lambda: f"no {text!r} in: {self.output}")

    def wait_for_ranks(self, text, *names):
        """Wait until the logs of these ranks, as `n1-rank0`, hold the text."""
        logs = [self.run_dir / f"{name}-restart0.log" for name in names]
        wait_for(lambda: all(text in text_of(log) for log in logs), lambda: self.output)


@pytest.fixture
def job(minicluster, tmp_path, leftovers):
    minicluster.drain()
    made = Job(minicluster, tmp_path, leftovers)
    yield made
    if made.id:
        minicluster("exec", "scancel", "--full", made.id, check=False)
