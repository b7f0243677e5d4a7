import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from shardclip.launch.cli import main

ROOT = Path(__file__).resolve().parents[2]
# fails the moment anything asks for torch
NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.split('.')[0] != 'torch', 'torch was imported'
sys.meta_path.insert(0, Refuse())
from shardclip.launch.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["slurm", "--help"],
        ["run", "--help"],
        ["check", "--help"],
        ["env"],
        ["env", "--json"],
        ["slurm", "-N", "2", "--dry-run", "train.py"],
        ["slurm", "-N", "2", "--launcher", "srun", "--dry-run", "train.py"],
        ["run", "--dry-run", "train.py"],
    ],
    ids=" ".join,
)
def test_login_nodes_need_no_torch(words):
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *words],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    # a word on its own, a path of this machine, is as long as it is
    lines = [line for line in done.stdout.splitlines() if len(line.rstrip(" \\").split()) > 1]
    assert max(map(len, lines)) < 100


def test_torch_would_have_been_noticed():
    code = NO_TORCH.replace("sys.exit(main())", "import torch")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert b"torch was imported" in done.stderr


def test_unknown_option_lists_the_valid_ones(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["slurm", "-N", "2", "--partitoin=x", "train.py"])
    errors = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "unknown option --partitoin; did you mean --partition?" in errors
    assert "--gpus-per-node" in errors
    assert "--sbatch KEY=VALUE" in errors


def test_what_follows_the_script_is_the_scripts_own(capsys):
    assert main(["run", "-n", "2", "--dry-run", "train.py", "-n", "5", "--help", "--", "x"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["torchrun", "--nnodes=1", "--nproc-per-node=2"]
    assert words[-7:] == ["--", "train.py", "-n", "5", "--help", "--", "x"]


def test_a_script_named_like_an_option(capsys):
    assert main(["run", "--dry-run", "--", "-x.py"]) == 0
    assert shlex.split(capsys.readouterr().out)[-2:] == ["--", "-x.py"]


def test_no_script_is_rejected(capsys):
    assert main(["run", "-n", "2"]) == 2
    assert "no script given" in capsys.readouterr().err


def test_env_hides_secrets(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JWT_TOKEN", "hunter2")
    monkeypatch.setenv("MASTER_ADDR", "n1")
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["source"] == "none"
    assert report["variables"]["SLURM_JWT_TOKEN"] == "<hidden>"
    assert report["variables"]["MASTER_ADDR"] == "n1"


def test_env_tells_the_hosts_of_an_allocation(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert "n1 n2" in printed
    assert "one launcher on each of the 2 hosts" in printed


def test_dry_run_hides_secrets_and_output_keeps_them(capsys, tmp_path):
    words = ["slurm", "-N", "1", "--env", "API_KEY=hunter2", "train.py"]
    assert main([*words[:3], "--dry-run", *words[3:]]) == 0
    assert "hunter2" not in capsys.readouterr().out
    target = tmp_path / "job.sbatch"
    assert main([*words[:3], "--output", str(target), *words[3:]]) == 0
    assert "hunter2" in target.read_text()
    assert target.stat().st_mode & 0o077 == 0


def test_sbatch_missing_is_rejected(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main(["slurm", "-N", "1", "train.py"]) == 2
    assert "sbatch is not on this host" in capsys.readouterr().err


def test_loopback_with_two_hosts_is_rejected(capsys):
    words = "run --nnodes 2 --node-rank 1 --master-addr localhost --master-port 12345 x.py"
    code = subprocess.run(
        [sys.executable, "-m", "shardclip.launch", *words.split()],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert code.returncode == 2
    assert "loopback" in code.stderr
