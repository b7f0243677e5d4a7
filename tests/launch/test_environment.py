import pytest
from shardclip.launch.environment import Placement, detect, detect_hosts
from shardclip.launch.errors import LaunchError

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_NODELIST": "n[2-4]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_TASK_PID": "77",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
ONE_TASK = STEP | {
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}  # fmt: skip
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "n1", "MASTER_PORT": "1234",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, Placement("none")),
        (STEP, Placement("slurm", 3, 5, 1, 2, 1, 3, "n2")),
        (TORCHRUN, Placement("torchrun", 5, 8, 1, 4, 1, 2, "n1", 1234)),
        (OPEN_MPI, Placement("openmpi", 2, 4, 0, 2, 1, 2)),
        (PMI, Placement("pmi", 3, 4, 1, 2, 1, 2)),
        (POD, Placement("kubernetes", 1, 2, 0, 1, 1, 2, "job-master-0", 23456)),
    ],
    ids=["none", "slurm", "torchrun", "openmpi", "pmi", "kubernetes"],
)
def test_ranks_follow_the_launcher(environ, place):
    assert detect(environ) == place


def test_the_innermost_launcher_counts():
    assert detect(STEP | TORCHRUN).source == "torchrun"
    # mpirun's daemons were started by srun: their task numbers are not the ranks
    assert detect(STEP | OPEN_MPI).source == "openmpi"
    assert detect(STEP | PMI).source == "pmi"
    same_size = STEP | PMI | {"PMI_RANK": "3", "PMI_SIZE": "5"}
    assert detect(same_size).source == "slurm"


def test_an_allocation_without_a_step_is_no_rank():
    batch = {k: v for k, v in STEP.items() if "STEP" not in k}
    assert detect(batch).source == "none"
    # newer Slurm runs batch scripts and salloc's shell in steps of their own
    assert detect(STEP | {"SLURM_STEP_ID": "4294967291"}).source == "none"
    assert not detect_hosts(ONE_TASK | {"SLURM_STEP_ID": "4294967290"}).in_step


def test_hosts_of_a_step_are_the_steps_own():
    hosts = detect_hosts(ONE_TASK)
    assert (hosts.nnodes, hosts.node_rank, hosts.names) == (3, 1, ("n2", "n3", "n4"))
    assert hosts.master_addr == "n2"
    assert hosts.run_id == "12.0.0"


def test_a_restart_is_another_run():
    assert detect_hosts(ONE_TASK | {"SLURM_RESTART_COUNT": "2"}).run_id == "12.0.2"


def test_hosts_of_pods():
    hosts = detect_hosts(POD | {"PET_NNODES": "3", "PET_NODE_RANK": "2"})
    assert (hosts.nnodes, hosts.node_rank, hosts.master_addr) == (3, 2, "job-master-0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_STEP_NODELIST": ""}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, "disagree"),
        ({"SLURM_NODEID": "7"}, "disagree"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
        ({"SLURM_PROCID": "9"}, "below the world size"),
    ],
)
def test_contradicting_slurm_variables_are_rejected(change, message):
    environ = STEP | change
    if message is None:
        environ["SLURM_JOB_NODELIST"] = environ["SLURM_NODELIST"] = ""
        message = "host list is empty"
    with pytest.raises(LaunchError, match=message):
        detect(environ)


def test_several_launchers_a_host_are_rejected():
    with pytest.raises(LaunchError, match=r"2 tasks a host.*--ntasks-per-node=1"):
        detect_hosts(STEP)


def test_disagreeing_node_counts_are_rejected():
    with pytest.raises(LaunchError, match="names 3 hosts, Slurm says 2"):
        detect_hosts(ONE_TASK | {"SLURM_STEP_NUM_NODES": "2"})


def test_empty_node_list_is_rejected():
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": ""}
    with pytest.raises(LaunchError, match="empty"):
        detect_hosts(environ)


def test_rank_without_local_rank_is_rejected():
    with pytest.raises(LaunchError, match="PMI_RANK is set but none of"):
        detect({"PMI_RANK": "0", "PMI_SIZE": "2"})
