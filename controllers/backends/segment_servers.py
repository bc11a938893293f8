"""The nodes of a run, where there are several: what they are called, and the servers through which each reads the others' segments."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.buffer.run_files import LOGS
from ...dataflow.buffer.scratch import notes
from ...dataflow.buffer.segments import Segment
from .backend import Files, plain_name, this_node
from .node_logs import BRING_S, NewText, NodeLogs, new_text
from .sample_note import SampleNote
from .witness.witness import SAMPLE_S, Witness

if TYPE_CHECKING:
    from ...dataflow.buffer.deletions import Deletions
    from ...dataflow.buffer.peers import Peers
    from .witness.memory import Memory

LOOK_S = 1.0
"""Seconds between two looks whether the servers live."""
logger = logging.getLogger(__name__)


class SegmentHost:
    """The server of one node's segments, in its Ray actor process."""

    def __init__(self, files: Files, node: str, host: str, token: str, run: Path, *, encrypted: bool) -> None:
        from ...dataflow.buffer.certificate import make_certificate
        from ...dataflow.buffer.flight import SegmentServer

        own = make_certificate() if encrypted else None
        folder = files.of_node(node)
        self._logs = folder / LOGS
        self._witness = Witness(files.logs_of_node(node, run))
        threading.Thread(target=self._take_readings, name="readings", daemon=True).start()
        self.server = SegmentServer(folder, node, host=host, token=token, certificate=own)
        self._certificate = own.certificate if own else None
        self._notes = [f"node {node!r}: {note}" for note in notes(folder)]

    def location(self) -> tuple[str, bytes | None, list[str]]:
        """Where it listens, its certificate, if it encrypts, and what speaks against its folder."""
        return self.server.location, self._certificate, self._notes

    def new_text(self, known: Mapping[str, int]) -> NewText:
        """What is new in the logs that processes of this node keep here."""
        return new_text(self._logs, known)

    def sample_at(self, group: str, rank: int) -> int | None:
        """The sample that a rank of this node noted last."""
        return SampleNote.read(SampleNote.path(self._logs, group, rank))

    def _take_readings(self) -> None:
        while True:
            self._witness.look()
            time.sleep(SAMPLE_S)

    def look(self, processes: Mapping[str, int]) -> Memory:
        """Watch these processes of this node from here on; returns the memory of the node and of those that were watched before."""
        self._witness.watch(processes)
        return self._witness.memory()

    def stacks(self, processes: Mapping[str, int], whose: Collection[str]) -> dict[str, str]:
        """Where some of the processes of this node stand."""
        self._witness.watch(processes)
        return self._witness.stacks(whose)

    def ending(self, who: str, *, blamed: bool) -> str:
        """How a process of this node ended, if it was watched."""
        return self._witness.ending(who, blamed=blamed)

    def last(self) -> None:
        """Never returns: who waits for it learns that the process has ended."""
        threading.Event().wait()


class SegmentServers:
    """The servers of a run, one on each node; none when it has one node only."""

    def __init__(self) -> None:
        self.peers: Peers | None = None
        self._actors: dict[str, Any] = {}
        """Name of a node -> its server."""
        self._lives: dict[Any, str] = {}
        """Promise that is broken when a server ends -> name of its node."""
        self._asked: dict[Any, str] = {}
        """Promise of where a server listens -> name of its node."""
        self._standing: dict[str, tuple[str, bytes | None, list[str]]] = {}
        """Name of a node -> what its server has said."""
        self._looked = 0.0
        """When it was last looked whether they live."""
        self._noted: set[str] = set()
        self._logs: NodeLogs | None = None
        self._deletions: Deletions | None = None
        self._token = secrets.token_hex(32)
        self._loopback = True
        """All nodes are this machine."""

    def start(self, files: Files, names: Mapping[str, str], run: Path) -> None:
        """Start a server on each node that has none; others go on. Returns at once: `advance` until nobody is `awaited`.

        Args:
            files: where the nodes keep segments.
            names: Ray's id of a node -> its name in references, of all nodes that are there.
            run: the directory of the run.
        """
        import ray

        addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
        loopback = len({addresses[id] for id in names}) == 1
        if loopback != self._loopback:  # those that listen on loopback alone are of no use to another machine
            self.kill()
        self._loopback = loopback
        for id, name in names.items():
            if name not in self._actors:
                self._actors[name] = self._start(files, id, name, "127.0.0.1" if loopback else addresses[id], run)
        for name in self._actors.keys() - set(names.values()):  # of nodes that are gone
            del self._actors[name]
        self._lives = {life: name for life, name in self._lives.items() if name in self._actors}
        self._asked = {server.location.remote(): name for name, server in self._actors.items()}
        self._standing.clear()

    @property
    def hosts(self) -> Mapping[str, Any]:
        """Name of a node -> its server, an actor with the methods of `SegmentHost`; none where the run has one node."""
        return self._actors

    @property
    def awaited(self) -> list[str]:
        """Nodes whose servers have not said where they listen."""
        return sorted(self._asked.values())

    def advance(self, wait_s: float = 0.0) -> bool:
        """Take what servers have said; returns whether the last of them has, so that `peers` are new.

        Args:
            wait_s: longest wait for the next of them.
        """
        import ray
        from ray.exceptions import RayError

        if not self._asked:
            return False
        ready: list[Any]
        ready, _ = ray.wait(list(self._asked), num_returns=1, timeout=wait_s)
        for promise in ready:
            name = self._asked.pop(promise)
            with suppress(RayError):  # it has ended: `take_ended` says so
                self._standing[name] = ray.get(promise)
        if self._asked or self._standing.keys() != self._actors.keys():
            return False
        self._meet()
        return True

    def forget(self, name: str) -> None:
        """End the server of a node that is of no use, whether it has started or not."""
        import ray

        if (actor := self._actors.pop(name, None)) is not None:
            ray.kill(actor)
        self._lives = {life: node for life, node in self._lives.items() if node != name}

    def _meet(self) -> None:
        from ...dataflow.buffer.deletions import Deletions
        from ...dataflow.buffer.peers import Peers

        locations = {name: location for name, (location, *_) in self._standing.items()}
        certificates = {location: certificate for location, certificate, _ in self._standing.values() if certificate}
        self._warn(note for *_, found in self._standing.values() for note in found)
        self.tell_deletions()
        self.peers = Peers(locations, self._token, certificates)
        self._deletions = Deletions(self.peers)

    def _warn(self, found: Iterable[str]) -> None:
        for note in found:
            if note not in self._noted:
                logger.warning("%s", note)
            self._noted.add(note)

    def _start(self, files: Files, id: str, name: str, host: str, run: Path) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(id, soft=False)
        remote: Any = ray.remote
        server = remote(SegmentHost).options(num_cpus=0, scheduling_strategy=strategy, max_concurrency=2)
        actor = server.remote(files, name, host, self._token, run, encrypted=not self._loopback)
        self._lives[actor.last.remote()] = name
        return actor

    def keep_logs(self, logs: Path) -> None:
        """Bring the logs of nodes that do not see the run's directory into this folder of it, when `look` is called."""
        self._logs = self._logs or NodeLogs(logs)

    def look_at_logs(self) -> None:
        """Take what has come of them; waits for nobody."""
        if self._logs is not None and self._actors:
            self._logs.look(self._actors)

    def bring_logs(self) -> None:
        """Bring what they have now."""
        if self._logs is not None and self._actors:
            self._logs.bring(self._actors)

    def sample_at(self, node: str, group: str, rank: int) -> int | None:
        """The sample that a rank on a node noted last, if it noted it there, and the node is still there to say so."""
        import ray
        from ray.exceptions import RayError

        silent = self._logs.silent if self._logs is not None else set[str]()
        if node not in self._actors or node in silent:
            return None
        ready, late = ray.wait([self._actors[node].sample_at.remote(group, rank)], timeout=BRING_S)
        silent |= {node} if late else set()
        try:
            return ray.get(ready[0]) if ready else None
        except RayError:  # the node is gone, with the note
            return None

    def take_ended(self) -> bool:
        """Forget the servers whose processes have ended, so that `start` starts others; looks every LOOK_S.

        Returns:
            Whether one has.
        """
        if not self._lives or time.monotonic() - self._looked < LOOK_S:
            return False
        import ray

        self._looked = time.monotonic()
        ended, _ = ray.wait(list(self._lives), num_returns=len(self._lives), timeout=0)
        for life in ended:
            name = self._lives.pop(life)
            if self._actors.pop(name, None) is not None:
                logger.warning("the server of segments on node %r has ended, and is started again", name)
        return bool(ended)

    def unreadable(self, segments: Collection[Segment]) -> Mapping[Segment, str]:
        """Those of the segments that cannot be read on their nodes, and why."""
        return self.peers.unreadable(segments) if self.peers is not None else {}

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
        self._lives.clear()
        self._asked.clear()


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
