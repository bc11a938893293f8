"""The nodes of a run, where there are several: what they are called, and the servers through which each reads the others' segments."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .backend import START_TIMEOUT_S, plain_name, this_node

if TYPE_CHECKING:
    from ...dataflow.buffer.deletions import Deletions
    from ...dataflow.buffer.peers import Peers


class SegmentHost:
    """The server of one node's segments, in its Ray actor process."""

    def __init__(self, folder: Path, node: str, host: str, token: str, *, encrypted: bool) -> None:
        from ...dataflow.buffer.certificate import make_certificate
        from ...dataflow.buffer.flight import SegmentServer

        own = make_certificate() if encrypted else None
        self.server = SegmentServer(folder, node, host=host, token=token, certificate=own)
        self._certificate = own.certificate if own else None

    def location(self) -> tuple[str, bytes | None]:
        """Where it listens, and its certificate, if it encrypts."""
        return self.server.location, self._certificate


class SegmentServers:
    """The servers of a run, one on each node; none when it has one node only."""

    def __init__(self) -> None:
        self.peers: Peers | None = None
        self._actors: list[Any] = []
        self._deletions: Deletions | None = None

    def start(self, folder: Path, names: Mapping[str, str]) -> Peers:
        """Start a server on each node.

        Args:
            folder: it has a folder for each node.
            names: Ray's id of a node -> its name in references.

        Returns:
            The addresses of the servers, for the ranks.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from ...dataflow.buffer.deletions import Deletions
        from ...dataflow.buffer.peers import Peers

        token = secrets.token_hex(32)
        addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
        loopback = len({addresses[id] for id in names}) == 1  # all of them are this machine
        for id, name in names.items():
            host = "127.0.0.1" if loopback else addresses[id]
            strategy = NodeAffinitySchedulingStrategy(id, soft=False)
            server = ray.remote(SegmentHost).options(num_cpus=0, scheduling_strategy=strategy)
            self._actors.append(server.remote(folder / name, name, host, token, encrypted=not loopback))
        standing = ray.get([server.location.remote() for server in self._actors], timeout=START_TIMEOUT_S)
        locations = {name: location for name, (location, _) in zip(names.values(), standing, strict=True)}
        certificates = {location: certificate for location, certificate in standing if certificate}
        self.peers = Peers(locations, token, certificates)
        self._deletions = Deletions(self.peers)
        return self.peers

    def delete(self, node: str, file: str) -> None:
        """Have all nodes let go of a file; returns at once."""
        if self._deletions is not None:
            self._deletions(node, file)

    def tell_deletions(self) -> None:
        """Tell the servers, while they are there, what is left to be deleted."""
        if self._deletions is not None:
            self._deletions.close()

    def kill(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)


def node_names(nodes: Sequence[Mapping[str, Any]], here: str) -> dict[str, str]:
    """What nodes are called in references: after their hosts, the same in the next run.

    Args:
        nodes: as `ray.nodes()` describes them.
        here: Ray's id of this node.

    Returns:
        Ray's id -> name, of this node and of those that are alive.
    """
    names = {here: this_node()}
    for node in sorted(nodes, key=lambda n: (n["NodeManagerHostname"], n["NodeID"])):
        if node["Alive"] and node["NodeID"] not in names:
            base = plain_name(node["NodeManagerHostname"])
            candidates = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
            names[node["NodeID"]] = next(name for name in candidates if name not in names.values())
    return names
