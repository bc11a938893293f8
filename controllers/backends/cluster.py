"""An existing Ray cluster, before anything is started on it: where it is, whether it lets us in, and how large its nodes are.

    address_of("head:6379")     checked as text, at once
    nodes_of("head:6379")       asked of the cluster by a program of its own (`cluster_probe.py`), which a deadline ends

Ray has no deadline of its own for joining a cluster, and a connection that hangs cannot be ended in this process.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...dataflow.errors import UserError

VARIABLE = "RAY_ADDRESS"
PROBE_TIMEOUT_S = 60.0
"""Longest wait for the program that asks. Its own waits are shorter, but it imports Ray, perhaps from a slow disk."""
EXAMPLE = "ray-head:6379"


def address_of(given: str | None) -> str | None:
    """The address of the cluster that an argument or `RAY_ADDRESS` names: `host:port` or "auto"; None: a local one is wanted.

    >>> address_of("ray-head:6379")
    'ray-head:6379'
    >>> address_of("http://ray-head:8265")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: RayBackend('http://ray-head:8265') is the address of a dashboard or a job server; a driver \
joins a cluster by host:port, such as ray-head:6379 (`ray job submit --address http://ray-head:8265 -- python SCRIPT` runs it there)

    Raises:
        UserError: it is not an address of a cluster.
    """
    address = given or os.environ.get(VARIABLE) or "local"
    if address in ("local", "auto"):
        return None if address == "local" else address
    where = f"RayBackend({given!r})" if given else f"{VARIABLE}={address!r}"
    scheme, _, rest = address.rpartition("://")
    if scheme in ("http", "https"):
        raise UserError(
            f"{where} is the address of a dashboard or a job server; a driver joins a cluster by host:port, such as {EXAMPLE} "
            f"(`ray job submit --address {address} -- python SCRIPT` runs it there)"
        )
    if scheme:
        raise UserError(
            f"{where}: a driver runs on a node of its cluster and joins it by host:port, such as {EXAMPLE}, not by {scheme}://"
        )
    try:
        parts = urlsplit(f"//{rest}")
        sound = bool(parts.hostname and parts.port) and rest == parts.netloc and "@" not in rest
    except ValueError:  # the port is no number, or an IPv6 address stands without its brackets
        sound = False
    if not sound:
        raise UserError(f'{where} is no address of a Ray cluster: that is host:port, such as {EXAMPLE}, or "auto"')
    return address


def may_be_same(address: str, joined: str) -> bool:
    """Whether an address may be that of the cluster that this process has joined.

    >>> may_be_same("auto", "10.0.0.1:6379"), may_be_same("127.0.0.1:6379", "10.0.0.1:6379")
    (True, True)
    >>> may_be_same("10.0.0.2:6379", "10.0.0.1:6379"), may_be_same("127.0.0.1:6380", "10.0.0.1:6379")
    (False, False)

    Args:
        address: `host:port`, or "auto".
        joined: `host:port` of that cluster.
    """
    if address in ("auto", joined):
        return True
    (host, _, port), (joined_host, _, joined_port) = address.rpartition(":"), joined.rpartition(":")
    if port != joined_port:
        return False
    ours, theirs = _addresses(host), _addresses(joined_host)
    return not (ours and theirs) or any(one.is_loopback for one in ours | theirs) or bool(ours & theirs)


def _addresses(host: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of a host; none if it is not known."""
    try:
        return {ipaddress.ip_address(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)}
    except (OSError, ValueError):
        return set()


def nodes_of(address: str) -> list[Mapping[str, float]]:
    """The resources of each node of a cluster that lets us in: `{"CPU": 16.0, "GPU": 8.0, ...}`.

    Raises:
        UserError: it cannot be joined.
    """
    probe = Path(__file__).with_name("cluster_probe.py")
    try:
        asked = subprocess.run(
            [sys.executable, "-P", str(probe), address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_S,
            text=True,
        )
        last: dict[str, Any] = json.loads(
            ([line for line in asked.stdout.splitlines() if line.startswith("{")] or ["{}"])[-1]
        )
    except subprocess.TimeoutExpired:
        last = {"error": f"no answer within {PROBE_TIMEOUT_S:.0f} s"}
    if "nodes" in last:
        return last["nodes"]
    who = "the Ray cluster of this machine ('auto')" if address == "auto" else f"the Ray cluster at {address}"
    raise UserError(f"{who} cannot be joined: {last.get('error', 'Ray itself could not be started')}")


def sizes(nodes: Sequence[Mapping[str, float]]) -> list[tuple[int, int]]:
    """CPUs and GPUs of each node."""
    return [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]
