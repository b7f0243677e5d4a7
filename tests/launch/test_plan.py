import shlex

import pytest
from shardclip.launch.environment import Hosts
from shardclip.launch.errors import LaunchError
from shardclip.launch.options import RunOptions
from shardclip.launch.plan import make_plan, torchrun_arguments

DEFAULTS = RunOptions()
ALONE = Hosts("none")
SLURM = Hosts("slurm", 2, 1, ("n1", "n2"), "n1", None, "12.0.0")


def plan(options=DEFAULTS, hosts=ALONE, environ=None):
    return make_plan(options, hosts, {"OMP_NUM_THREADS": "1", **(environ or {})}, "own")


def arguments(options, hosts):
    return torchrun_arguments(options, plan(options, hosts), 4000, "/x/control")


def test_alone_takes_all_devices_or_cpus(monkeypatch):
    monkeypatch.setattr("shardclip.launch.plan.cpus", lambda: 6)
    assert plan(environ={"CUDA_VISIBLE_DEVICES": "0,1,5"}).nproc_per_node == 3
    assert plan(environ={"CUDA_VISIBLE_DEVICES": ""}).nproc_per_node == 6


def test_threads_share_the_affinity_mask(monkeypatch):
    monkeypatch.setattr("shardclip.launch.plan.cpus", lambda: 16)
    options = RunOptions(nproc_per_node=3)
    assert make_plan(options, Hosts("none"), {}, "own").environ["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in plan(options).environ


def test_ranks_that_share_a_core_are_warned_of(monkeypatch):
    monkeypatch.setattr("shardclip.launch.plan.cpus", lambda: 1)
    found = plan(RunOptions(nproc_per_node=4))
    assert found.warnings == (
        "4 ranks share 1 CPU, so some share a core; under Slurm ask for more with --cpus-per-task",
    )
    assert plan(RunOptions(nproc_per_node=1)).warnings == ()


def test_slurm_gives_rank_and_address():
    words = arguments(RunOptions(nproc_per_node=2, command=("a b.py", "-x")), SLURM)
    assert words[:10] == [
        "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=12.0.0", "--max-restarts=0",
        "--node-rank=1", "--master-addr=n1", "--master-port=4000", "--rdzv-conf=timeout=300",
        "--log-dir=/x/torch", "--no-python",
    ]  # fmt: skip
    assert words[-3:] == ["--", "a b.py", "-x"]
    assert shlex.split(shlex.join(words)) == words


def test_c10d_tells_who_hosts_the_store():
    options = RunOptions(rdzv_backend="c10d", nproc_per_node=1)
    head, other = (
        arguments(options, Hosts("slurm", 2, rank, ("n1", "n2"), "n1", None, "1.0.0"))
        for rank in (0, 1)
    )
    assert any("is_host=true" in word for word in head)
    assert any("is_host=false" in word for word in other)
    added = plan(options, SLURM).environ
    assert added["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in plan(RunOptions(), SLURM).environ


def test_ipv6_address_stands_in_brackets():
    options = RunOptions(
        rdzv_backend="c10d", nnodes=2, node_rank=0, master_addr="fd00::1", master_port=4000
    )
    assert "--rdzv-endpoint=[fd00::1]:4000" in arguments(options, Hosts("none"))


@pytest.mark.parametrize(
    ("options", "hosts", "message"),
    [
        (RunOptions(nnodes=3), SLURM, "slurm gives 2 hosts"),
        (RunOptions(node_rank=0), SLURM, "SLURM_NODEID is 1"),
        (RunOptions(nnodes=2), Hosts("none"), "give --node-rank"),
        (RunOptions(nnodes=2, node_rank=2), Hosts("none"), "it is 0 to 1"),
        (RunOptions(nnodes=2, node_rank=0), Hosts("none"), "give --master-addr"),
        (RunOptions(nnodes=2, node_rank=0, master_addr="a"), Hosts("none"), "give --master-port"),
        (RunOptions(master_port=6000), Hosts("none"), "X11"),
        (RunOptions(master_port=70000), Hosts("none"), "1 to 65535"),
    ],
)
def test_contradicting_options_are_rejected(options, hosts, message):
    with pytest.raises(LaunchError, match=message):
        plan(options, hosts)
