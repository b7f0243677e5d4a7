"""Addresses, ports and interfaces: what cannot work is refused before anything starts."""

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from .errors import LaunchError

_X11 = range(6000, 6064)


def refuse_port(port: int, what: str = "--master-port") -> None:
    """Raise LaunchError for a port that cannot serve: out of range, privileged or X11's."""
    if not 1 <= port <= 65535:
        raise LaunchError(f"{what} {port}: a port is a number from 1 to 65535")
    if port in _X11:
        raise LaunchError(
            f"{what} {port}: 6000 to 6063 are X11's ports, in use wherever a display is "
            "forwarded; take another, or leave it out to have a free one found"
        )
    if port < 1024 and os.geteuid() != 0:
        raise LaunchError(f"{what} {port}: ports below 1024 need root; take another")


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of a host; raises LaunchError if its name does not resolve."""
    try:
        found = socket.getaddrinfo(unbracketed(host), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"head address {host!r} does not resolve on {socket.gethostname()}: {error}; "
            "give an address that every host knows with --master-addr"
        ) from error
    return [(family, str(address[0])) for family, _, _, _, address in found]


def refuse_loopback(host: str, addresses: list[str], nnodes: int) -> None:
    """Raise LaunchError where several hosts would each connect to themselves."""
    if nnodes < 2:
        return
    loopback = [a for a in addresses if ipaddress.ip_address(a.split("%")[0]).is_loopback]
    if loopback and len(loopback) == len(addresses):
        raise LaunchError(
            f"head address {host!r} is {loopback[0]}, a loopback address, on "
            f"{socket.gethostname()}: with {nnodes} hosts each would wait for itself. Give an "
            "address that all hosts reach with --master-addr, or mend /etc/hosts"
        )


def free_port(family: socket.AddressFamily = socket.AF_INET) -> int:
    """Return a port that could be bound on all of this host's addresses."""
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        if port not in _X11:
            return port


def refuse_occupied(port: int) -> None:
    """Raise LaunchError if another program listens on this host's port."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # as torch's store does: a port in TIME_WAIT is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            raise LaunchError(
                f"port {port} on {socket.gethostname()} cannot be bound: {error}. Another program "
                "holds it; take another, or leave out --master-port and MASTER_PORT to have a "
                "free one found"
            ) from error


def unbracketed(host: str) -> str:
    """Return an IPv6 address without the brackets in which URLs write it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def endpoint(host: str, port: int) -> str:
    """Write host and port as one word, an IPv6 address in brackets."""
    host = unbracketed(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def interfaces() -> list[str]:
    """Return the names of this host's network interfaces."""
    try:
        return sorted(path.name for path in Path("/sys/class/net").iterdir())
    except OSError:
        return [name for _, name in socket.if_nameindex()]


def interface_warnings(environ: Mapping[str, str], present: list[str]) -> list[str]:
    """Check NCCL's and Gloo's interface variables, whose syntaxes look alike and differ.

    NCCL takes prefixes, `=` for exact names and `^` to exclude; Gloo takes exact names only.

    Args:
        environ: usually `os.environ`.
        present: the host's interfaces.

    Returns:
        One sentence for each fault, with the mend.
    """
    warnings = []
    gloo = environ.get("GLOO_SOCKET_IFNAME", "")
    if gloo[:1] in {"^", "="}:
        warnings.append(
            f"GLOO_SOCKET_IFNAME={gloo!r} is NCCL's syntax: Gloo takes exact names, separated "
            f"by commas, of {', '.join(present)}"
        )
    elif gloo:
        missing = [name for name in gloo.split(",") if name not in present]
        if missing:
            warnings.append(
                f"GLOO_SOCKET_IFNAME={gloo!r}: this host has no interface {missing[0]!r} (Gloo "
                f"takes exact names, no prefixes); it has {', '.join(present)}"
            )
    nccl = environ.get("NCCL_SOCKET_IFNAME", "")
    if nccl and not nccl.startswith("^"):
        exact, names = nccl.startswith("="), nccl.lstrip("=").split(",")
        found = [p for p in present for n in names if (p == n if exact else p.startswith(n))]
        if not found:
            kind = "named" if exact else "whose name starts with"
            warnings.append(
                f"NCCL_SOCKET_IFNAME={nccl!r}: this host has no interface {kind} "
                f"{' or '.join(names)}; it has {', '.join(present)}"
            )
    return warnings
