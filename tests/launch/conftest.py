"""The three-node cluster, started once, and the search for processes that a test left."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REQUIRED = "SHARDCLIP_REQUIRE_CLUSTER"
PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "unshare", "nsenter")


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
        for pid, _ in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def assert_none(self, seconds=20.0):
        end = time.monotonic() + seconds
        while self.processes() and time.monotonic() < end:
            time.sleep(0.1)
        assert self.processes() == []


@pytest.fixture
def leftovers():
    made = Leftovers()
    yield made
    made.kill()


class Cluster:
    """Runs commands on the cluster's login side and nodes."""

    def __init__(self, root):
        self._environ = os.environ | {
            "MC_ROOT": str(root), "MC_REQUEUE_DELAY": "6", "MC_SUBNET": "10.178.0",
        }  # fmt: skip
        self.root = root

    def __call__(self, *words, check=True, timeout=120):
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
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if not self("exec", "squeue", "-h", check=False).stdout.strip():
                idle = self("exec", "sinfo", "-h", "-N", "-p", "batch", "-t", "idle", "-o", "%N")
                if len(set(idle.stdout.split())) == 3:
                    return
            time.sleep(0.2)
        raise AssertionError(self("status", check=False).stdout)


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
        done = self.launch("slurm", "--time=5", f"--python={sys.executable}", *words, **environ)
        self.id = done.stdout.strip()
        assert self.id.isdigit(), done.stderr
        return self

    def wait(self, seconds=150):
        """Return the final state, exit code and number of restarts."""
        words = self._cluster("wait", self.id, seconds, check=False, timeout=seconds + 20)
        state, code, restarts = words.stdout.split()
        code = code.removeprefix("ExitCode=").split(":")[0]
        return state, int(code), int(restarts.removeprefix("Restarts="))

    @property
    def output(self):
        return (self._path / f"slurm-{self.id}.out").read_text()

    @property
    def run_dir(self):
        return self._path / "shardclip-runs" / self.id

    def wait_for(self, text, seconds=90):
        """Wait until the job's output holds the text."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if text in self.output:
                    return
            except FileNotFoundError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"no {text!r} in: {self.output}")


@pytest.fixture
def job(minicluster, tmp_path, leftovers):
    minicluster.drain()
    made = Job(minicluster, tmp_path, leftovers)
    yield made
    if made.id:
        minicluster("exec", "scancel", "--full", made.id, check=False)
