import copy

import pytest
from shardclip.launch.check import table
from shardclip.launch.verdict import judge

RANK = {
    "host": "n1", "rank": 0, "local_rank": 0, "node_rank": 0, "device": "cpu", "cpus": 2,
    "devices_on_host": 0, "threads": 1,
    "versions": {"torch": "2.13", "nccl": "-", "driver": "-", "shardclip": "0.1"},
    "head": {"address": "n1", "port": 5, "resolves_to": ["10.0.0.1"], "seconds": 0.001},
    "clock": [0.0, 0.0],
    "all_reduce": {"right": True, "latency_seconds": 1e-4, "bytes": 4 << 20,
                   "bandwidth_bytes_per_second": 1e9},
    "gradient_norm": {"reference": 2.0, "norm": 2.0},
}  # fmt: skip


def ranks():
    three = []
    for rank in range(3):
        facts = copy.deepcopy(RANK)
        facts |= {"host": f"n{rank + 1}", "rank": rank, "node_rank": rank}
        three.append(facts)
    return three


def test_nothing_is_at_fault():
    assert all(finding.ok for finding in judge(ranks()))


@pytest.mark.parametrize(
    ("check", "change", "text"),
    [
        ("versions", {"versions": RANK["versions"] | {"torch": "2.8"}}, "n2 has torch 2.8"),
        ("devices", {"device": "H200"}, "n2 has H200"),
        ("devices", {"local_rank": 3, "devices_on_host": 2}, "more ranks than devices"),
        ("clocks", {"clock": [-30.0, 0.1]}, "-30.0"),
        ("all-reduce", {"all_reduce": RANK["all_reduce"] | {"right": False}}, "wrong sum"),
        ("gradient norm", {"gradient_norm": {"reference": 2.0, "norm": 1.9}}, "sharded 1.9"),
        ("gradient norm", {"gradient_norm": {"reference": 2.0, "norm": float("nan")}}, "nan"),
        ("gradient norm", {"gradient_norm": {"reference": 2.0, "error": "no"}}, "could not run"),
    ],
)
def test_the_host_at_fault_is_named(check, change, text):
    three = ranks()
    three[1] |= change
    faults = [finding for finding in judge(three) if not finding.ok]
    assert [(f.check, f.at_fault) for f in faults] == [(check, ("n2",))]
    assert text in faults[0].text


def test_table_fits_80_columns():
    lines = table(ranks(), judge(ranks())).splitlines()
    assert max(map(len, lines)) < 80
    assert lines[1].split() == ["0", "n1", "0", "2", "1", "cpu"]
