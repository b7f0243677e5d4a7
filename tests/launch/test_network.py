import socket

import pytest
from shardclip.launch.errors import LaunchError
from shardclip.launch.network import (
    endpoint,
    free_port,
    interface_warnings,
    refuse_loopback,
    refuse_occupied,
    refuse_port,
    resolve,
)

PRESENT = ["docker0", "eth0", "eth1", "lo"]


@pytest.mark.parametrize("port", [6000, 6001, 6063])
def test_x11_ports_are_rejected(port):
    with pytest.raises(LaunchError, match="X11"):
        refuse_port(port)


def test_loopback_is_rejected_for_several_hosts_only():
    refuse_loopback("localhost", ["127.0.0.1"], 1)
    refuse_loopback("n1", ["127.0.1.1", "10.0.0.1"], 2)
    for addresses in (["127.0.1.1"], ["::1"], ["127.0.0.1", "::1"]):
        with pytest.raises(LaunchError, match=r"loopback.*--master-addr"):
            refuse_loopback("n1", addresses, 2)


def test_unknown_host_is_rejected(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # name servers are slow, or make things up
    with pytest.raises(LaunchError, match=r"'no\.such\.invalid' does not resolve.*--master-addr"):
        resolve("no.such.invalid", 1)


def test_occupied_port_is_rejected_and_a_free_one_is_not():
    refuse_occupied(free_port())
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        with pytest.raises(LaunchError, match="Another program holds it"):
            refuse_occupied(other.getsockname()[1])


def test_ipv6_endpoint():
    assert endpoint("fe80::1", 5) == endpoint("[fe80::1]", 5) == "[fe80::1]:5"
    assert endpoint("n1", 5) == "n1:5"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, None),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1", "NCCL_SOCKET_IFNAME": "eth"}, None),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, None),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, None),
        ({"GLOO_SOCKET_IFNAME": "^docker0"}, "NCCL's syntax"),
        ({"GLOO_SOCKET_IFNAME": "=eth0"}, "NCCL's syntax"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "no interface 'eth'"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "whose name starts with ib"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "no interface named eth"),
    ],
)
def test_interface_variables_are_checked_for_each_others_syntax(environ, message):
    found = interface_warnings(environ, PRESENT)
    assert (message is None and found == []) or (len(found) == 1 and message in found[0])
