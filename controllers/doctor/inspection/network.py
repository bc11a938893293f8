"""Network: the loopback interface, ports, and proxies that stand between processes of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from .finding import Finding, fail, ok, warn

ABOUT = "network"
PORTS_WARN_BELOW = 5_000
"""Free ports: a Ray node with its workers takes some hundreds."""
LOOPBACK = "127.0.0.1"


def look(environment: Mapping[str, str], root: Path = Path("/")) -> Iterator[Finding]:
    """Findings about the network."""
    yield loopback()
    yield host_name()
    yield ports(root)
    yield proxies(environment)


def loopback() -> Finding:
    """Whether processes of this machine reach each other: one socket listens, another one connects."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname(), timeout=1):
            return ok(ABOUT, "loopback", f"{LOOPBACK} answers")
    except OSError as error:
        return fail(ABOUT, "loopback", f"{LOOPBACK}: {error}", "ip link set lo up, and let no firewall close it")


def host_name() -> Finding:
    """Whether the name of this machine has an address: gloo looks it up."""
    name = socket.gethostname()
    with suppress(OSError):
        return ok(ABOUT, "host name", f"{name} is {socket.gethostbyname(name)}")
    return warn(ABOUT, "host name", f"{name} has no address", f"add '{LOOPBACK} {name}' to /etc/hosts")


def ports(root: Path) -> Finding:
    """How many ports are left for sockets that take any."""
    try:
        low, high = map(int, (root / "proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return ok(ABOUT, "ports", "the kernel does not say which it gives away")
    free = high - low + 1 - len(_taken(root, low, high))
    found = f"{free} free between {low} and {high}"
    if free >= PORTS_WARN_BELOW:
        return ok(ABOUT, "ports", found)
    return warn(ABOUT, "ports", found, "sysctl net.ipv4.ip_local_port_range='32768 60999', or end what holds them")


def _taken(root: Path, low: int, high: int) -> set[int]:
    """Local ports of this machine's sockets in a range."""
    found: set[int] = set()
    for table in ("proc/net/tcp", "proc/net/tcp6"):
        with suppress(OSError):
            lines = (root / table).read_text().splitlines()[1:]
            found |= {int(line.split()[1].rpartition(":")[2], 16) for line in lines}
    return {port for port in found if low <= port <= high}


def proxies(environment: Mapping[str, str]) -> Finding:
    """Whether a proxy stands between processes of this machine.

    >>> proxies({"http_proxy": "http://proxy:3128", "no_proxy": "localhost"}).outcome, proxies({}).outcome
    ('warn', 'ok')
    """
    names = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environment.get(name)]
    if not names:
        return ok(ABOUT, "proxies", "none")
    direct = environment.get("no_proxy", "") + "," + environment.get("NO_PROXY", "")
    if {LOOPBACK, "127.0.0.0/8", "127.0.0.0", "*"}.intersection(word.strip() for word in direct.split(",")):
        return ok(ABOUT, "proxies", f"{', '.join(names)}, not for {LOOPBACK}")
    found = f"{', '.join(names)} sends what goes to {LOOPBACK} through a proxy"
    return warn(ABOUT, "proxies", found, f"export no_proxy=localhost,{LOOPBACK}")
