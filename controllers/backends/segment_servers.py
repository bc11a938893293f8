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
        self._actors: dict[str, Any] = {}
        """Name of a node -> its server."""
        self._deletions: Deletions | None = None
        self._token = secrets.token_hex(32)
        self._loopback = True
        """All nodes are this machine."""

    def start(self, folder: Path, names: Mapping[str, str]) -> Peers:
        """Start a server on each node that has none; others go on.

        Args:
            folder: it has a folder for each node.
            names: Ray's id of a node -> its name in references, of all nodes that are there.

        Returns:
            The addresses of the servers, for the ranks.
        """
        import ray

        from ...dataflow.buffer.deletions import Deletions
        from ...dataflow.buffer.peers import Peers

        addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
        loopback = len({addresses[id] for id in names}) == 1
        if loopback != self._loopback:  # those that listen on loopback alone are of no use to another machine
            self.kill()
        self._loopback = loopback
        for id, name in names.items():
            if name not in self._actors:
                self._actors[name] = self._start(folder / name, id, name, "127.0.0.1" if loopback else addresses[id])
        for name in self._actors.keys() - set(names.values()):  # of nodes that are gone
            del self._actors[name]
        promises = [server.location.remote() for server in self._actors.values()]
        standing = ray.get(promises, timeout=START_TIMEOUT_S)
        locations = {name: location for name, (location, _) in zip(self._actors, standing, strict=True)}
        certificates = {location: certificate for location, certificate in standing if certificate}
        self.tell_deletions()
        self.peers = Peers(locations, self._token, certificates)
        self._deletions = Deletions(self.peers)
        return self.peers

    def _start(self, folder: Path, id: str, name: str, host: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(id, soft=False)
        server = ray.remote(SegmentHost).options(num_cpus=0, scheduling_strategy=strategy)
        return server.remote(folder, name, host, self._token, encrypted=not self._loopback)

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

        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()


def node_names(nodes: Sequence[Mapping[str, Any]], here: str, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """What nodes are called in references: after their hosts, the same in the next run.

    Args:
        nodes: as `ray.nodes()` describes them.
        here: Ray's id of this node.
        known: the names that were given before. They stay, and no other node gets one of them.

    Returns:
        Ray's id -> name, of this node, of those that are known, and of those that are alive.
    """
    names = {here: this_node(), **(known or {})}
    for node in sorted(nodes, key=lambda n: (n["NodeManagerHostname"], n["NodeID"])):
        if node["Alive"] and node["NodeID"] not in names:
            base = plain_name(node["NodeManagerHostname"])
            candidates = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
            names[node["NodeID"]] = next(name for name in candidates if name not in names.values())
    return names
