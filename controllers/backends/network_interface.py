"""The network interface of a node's address, to which gloo, NCCL and vLLM are held: each would take the first that it finds."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; None: this machine has no such interface.

    >>> interface_of("127.0.0.1")
    'lo'
    >>> interface_of("192.0.2.1")
    """
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        table = Path("/proc/net/if_inet6")
        lines = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
        return next((name for digits, *_, name in lines if int(digits, 16) == int(wanted)), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def network_environment(address: str) -> dict[str, str]:
    """Variables that hold the libraries of a process to the address of its node.

    >>> network_environment("127.0.0.1")
    {'VLLM_HOST_IP': '127.0.0.1', 'GLOO_SOCKET_IFNAME': 'lo', 'NCCL_SOCKET_IFNAME': '=lo'}
    """
    name = interface_of(address)
    found = {"VLLM_HOST_IP": address}
    return found | ({"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {})
