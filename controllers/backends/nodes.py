"""Nodes of a run: start a segment server on each node, and tell all ranks where the servers are.

    a rank came up ──on a known node──> it is told where the servers are ───────────────┐
         │                                                                              v
         ├──on a new node──> a server starts there ──> all ranks are told of it ──────> ready
         └──CONNECT_TIMEOUT_S──> its failure, which names the node

During a run nothing here blocks: the driver polls for answers of servers and ranks.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.buffer.scratch import notes
from ...dataflow.buffer.segments import Segment
from ...dataflow.errors import WorkerDied, WorkerError
from ...dataflow.runs.files import LOGS, make_folder
from ..group import Call
from ..ranks.tasks import Failure, FailureKind, Reply
from .backend import Event, Files, plain_name, this_node
from .rank import Standing
from .sample_note import SampleNote
from .witness import SAMPLE_S, Witness

if TYPE_CHECKING:
    from ...dataflow.buffer.flight import Deletions, Peers
    from .witness import Memory


# Node logs: ranks on machines that do not see the run's directory write their logs next to the
# segments of their node. The driver asks the node's segment server for new text: every LOG_S, after
# a rank died, and at the end. If a log grows by more than MAX_BYTES in between, its middle is lost.


_logger = logging.getLogger(__name__)
LOG_S = 10.0
"""[s] Time between two requests for new log text."""
MAX_BYTES = 256 << 10
"""[bytes] Maximum log text in one answer."""
BRING_S = 5.0
"""[s] Longest wait for the last log text of all nodes."""

NewText = Mapping[str, tuple[int, bytes]]
"""Name of a log -> position of its new text, and the text."""


def new_text(folder: Path, known: Mapping[str, int]) -> NewText:
    """Return the new text in the logs of a folder.

    Args:
        folder: Folder of logs, which may not exist.
        known: Log -> number of bytes seen.

    Returns:
        For each log that is new or has grown, at most the last MAX_BYTES.
    """
    found: dict[str, tuple[int, bytes]] = {}
    for path in sorted(folder.glob("*.log")):
        size, seen = path.stat().st_size, known.get(path.name, 0)
        begin = max(seen if seen <= size else 0, size - MAX_BYTES)
        if size > begin or path.name not in known:
            with path.open("rb") as file:
                file.seek(begin)
                found[path.name] = begin, file.read(size - begin)
    return found


class NodeLogs:
    """Copies the logs of other machines into the run's directory."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._asked_at = clock()
        self._asked: dict[Any, str] = {}
        """Promise of new text -> its node."""
        self._seen: dict[str, dict[str, int]] = {}
        """Node -> log -> number of bytes copied."""
        self.silent: set[str] = set()
        """Nodes that did not answer in time. `bring` does not wait for them until they have
        answered."""

    def look(self, hosts: Mapping[str, Any]) -> None:
        """Store answers that have arrived, and ask again if it is time, without waiting."""
        self._take_ready(0.0, list(self._asked))
        if self._clock() - self._asked_at >= LOG_S:
            self._ask(hosts)

    def bring(self, hosts: Mapping[str, Any]) -> None:
        """Ask for new text and wait up to BRING_S for all nodes."""
        # Pending answers may be older than now; the new answers include their text.
        self._asked = {promise: node for promise, node in self._asked.items() if node in self.silent}
        self._ask(hosts)
        self._take_ready(0.0, [promise for promise, node in self._asked.items() if node in self.silent])
        late = self._take_ready(
            BRING_S, [promise for promise, node in self._asked.items() if node not in self.silent]
        )
        self.silent |= {self._asked[promise] for promise in late}

    def _ask(self, hosts: Mapping[str, Any]) -> None:
        self._asked_at = self._clock()
        for node in hosts.keys() - {*self._asked.values()}:
            self._asked[hosts[node].new_text.remote(self._seen.get(node, {}))] = node

    def _take_ready(self, wait_s: float, promises: list[Any]) -> list[Any]:
        import ray

        if not promises:
            return []
        ready, late = ray.wait(promises, num_returns=len(promises), timeout=wait_s)
        self._take(ready)
        return late

    def _take(self, ready: list[Any]) -> None:
        import ray
        from ray.exceptions import RayError

        for promise in ready:
            node = self._asked.pop(promise)
            self.silent.discard(node)
            try:
                self.add(node, ray.get(promise))
            except RayError:  # its server has died and will be restarted
                continue
            except OSError as error:  # for example, a full disk: the run continues without the logs
                _logger.warning("the logs of node %s cannot be written for now: %s", node, error)

    def add(self, node: str, found: NewText) -> None:
        """Append new text of a node to the logs in the run's directory.

        Raises:
            OSError: The text cannot be written, for example on a full disk. It is sent again later.
        """
        seen = self._seen.setdefault(node, {})
        for name, (begin, text) in found.items():
            if Path(name).name != name:
                continue
            make_folder(self._folder)
            path, known = self._folder / name, seen.get(name, 0)
            end = begin + len(text)
            if begin < known <= end:  # part of the text was in an earlier answer
                text = text[known - begin :]
            elif begin > known:
                text = (
                    f"... {begin - known} bytes are left out here; they are on node {node} ...\n".encode()
                    + text
                )
            if not path.exists():
                path.touch(mode=0o600)
            with path.open("ab") as file:
                file.write(text)
            seen[name] = end


# Segment servers: with several nodes, each node serves its segments to the others


LOOK_S = 1.0
"""[s] Time between two checks that the servers are alive."""
logger = logging.getLogger(__name__)


class SegmentHost:
    """The segment server of a node, in a Ray actor. It also watches the run's processes there."""

    def __init__(
        self, files: Files, node: str, host: str, token: str, run: Path, *, encrypted: bool
    ) -> None:
        from ...dataflow.buffer.flight import SegmentServer, make_certificate

        own = make_certificate() if encrypted else None
        folder = files.of_node(node)
        self._logs = folder / LOGS
        self._witness = Witness(files.logs_of_node(node, run))
        threading.Thread(target=self._take_readings, name="readings", daemon=True).start()
        self.server = SegmentServer(folder, node, host=host, token=token, certificate=own)
        self._certificate = own.certificate if own else None
        self._notes = [f"node {node!r}: {note}" for note in notes(folder)]

    def location(self) -> tuple[str, bytes | None, list[str]]:
        """Its address, its certificate if it encrypts, and warnings about its folder."""
        return self.server.location, self._certificate, self._notes

    def new_text(self, known: Mapping[str, int]) -> NewText:
        return new_text(self._logs, known)

    def sample_at(self, group: str, rank: int) -> int | None:
        """The last sample that a rank of this node recorded."""
        return SampleNote.read(SampleNote.path(self._logs, group, rank))

    def _take_readings(self) -> None:
        while True:
            self._witness.look()
            time.sleep(SAMPLE_S)

    def look(self, processes: Mapping[str, int]) -> Memory:
        """Watch these processes of this node. Return the memory of the node and of the processes
        watched before."""
        self._witness.watch(processes)
        return self._witness.memory()

    def stacks(self, processes: Mapping[str, int], whose: Collection[str]) -> dict[str, str]:
        """Stack traces of some processes of this node."""
        self._witness.watch(processes)
        return self._witness.stacks(whose)

    def ending(self, who: str, *, blamed: bool) -> str:
        """How a watched process of this node ended, in words."""
        return self._witness.ending(who, blamed=blamed)

    def last(self) -> None:
        """Never return: a broken promise of this call shows that the process has died."""
        threading.Event().wait()


class SegmentServers:
    """The segment servers of a run, one per node; none if the run has only one node."""

    def __init__(self) -> None:
        self.peers: Peers | None = None
        self._actors: dict[str, Any] = {}
        """Node name -> its server."""
        self._lives: dict[Any, str] = {}
        """Promise that breaks when a server dies -> its node."""
        self._asked: dict[Any, str] = {}
        """Promise of a server's address -> its node."""
        self._standing: dict[str, tuple[str, bytes | None, list[str]]] = {}
        """Node name -> address, certificate and warnings of its server."""
        self._looked = 0.0
        """[s] Time of the last check that servers are alive."""
        self._noted: set[str] = set()
        self._logs: NodeLogs | None = None
        self._deletions: Deletions | None = None
        self._token = secrets.token_hex(32)
        self._loopback = True
        """Whether all nodes are on this machine."""

    def start(self, files: Files, names: Mapping[str, str], run: Path) -> None:
        """Start a server on each node that has none, without waiting. Call `advance` until no node
        is `awaited`.

        Args:
            files: Where the nodes keep segments.
            names: Ray's id -> name, for all current nodes.
            run: Directory of the run.
        """
        import ray

        addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
        loopback = len({addresses[id] for id in names}) == 1
        if loopback != self._loopback:  # servers on loopback cannot be reached from another machine
            self.kill()
        self._loopback = loopback
        for id, name in names.items():
            if name not in self._actors:
                self._actors[name] = self._start(
                    files, id, name, "127.0.0.1" if loopback else addresses[id], run
                )
        for name in self._actors.keys() - set(names.values()):  # lost nodes
            del self._actors[name]
        self._lives = {life: name for life, name in self._lives.items() if name in self._actors}
        self._asked = {server.location.remote(): name for name, server in self._actors.items()}
        self._standing.clear()

    @property
    def hosts(self) -> Mapping[str, Any]:
        """Node name -> its `SegmentHost` actor; empty if the run has one node."""
        return self._actors

    @property
    def awaited(self) -> list[str]:
        """Nodes whose servers have not reported their addresses."""
        return sorted(self._asked.values())

    def advance(self, wait_s: float = 0.0) -> bool:
        """Process answers of servers. Return whether the last one answered, so that `peers` are
        new."""
        import ray
        from ray.exceptions import RayError

        if not self._asked:
            return False
        ready: list[Any]
        ready, _ = ray.wait(list(self._asked), num_returns=1, timeout=wait_s)
        for promise in ready:
            name = self._asked.pop(promise)
            with suppress(RayError):  # it died: see `take_ended`
                self._standing[name] = ray.get(promise)
        if self._asked or self._standing.keys() != self._actors.keys():
            return False
        self._meet()
        return True

    def forget(self, name: str) -> None:
        import ray

        if (actor := self._actors.pop(name, None)) is not None:
            ray.kill(actor)
        self._lives = {life: node for life, node in self._lives.items() if node != name}

    def _meet(self) -> None:
        from ...dataflow.buffer.flight import Deletions, Peers

        locations = {name: location for name, (location, *_) in self._standing.items()}
        certificates = {
            location: certificate for location, certificate, _ in self._standing.values() if certificate
        }
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
        """Copy the logs of nodes that do not see the run's directory into this folder, on each
        `look_at_logs`."""
        self._logs = self._logs or NodeLogs(logs)

    def look_at_logs(self) -> None:
        """Store log text that has arrived, without waiting."""
        if self._logs is not None and self._actors:
            self._logs.look(self._actors)

    def bring_logs(self) -> None:
        """Copy new log text now."""
        if self._logs is not None and self._actors:
            self._logs.bring(self._actors)

    def sample_at(self, node: str, group: str, rank: int) -> int | None:
        """The last sample that a rank recorded on its node, or None if unknown."""
        import ray
        from ray.exceptions import RayError

        silent = self._logs.silent if self._logs is not None else set[str]()
        if node not in self._actors or node in silent:
            return None
        ready, late = ray.wait([self._actors[node].sample_at.remote(group, rank)], timeout=BRING_S)
        silent |= {node} if late else set()
        try:
            return ray.get(ready[0]) if ready else None
        except RayError:  # the node is gone, with its record
            return None

    def take_ended(self) -> bool:
        """Forget dead servers, so that `start` replaces them. Checks every LOOK_S.

        Returns:
            Whether a server has died.
        """
        if not self._lives or time.monotonic() - self._looked < LOOK_S:
            return False
        import ray

        self._looked = time.monotonic()
        ended, _ = ray.wait(list(self._lives), num_returns=len(self._lives), timeout=0)
        for life in ended:
            name = self._lives.pop(life)
            if self._actors.pop(name, None) is not None:
                logger.warning("the segment server on node %r has ended and is restarted", name)
        return bool(ended)

    def unreadable(self, segments: Collection[Segment]) -> Mapping[Segment, str]:
        """Segments that cannot be read on their nodes, and why."""
        return self.peers.unreadable(segments) if self.peers is not None else {}

    def delete(self, node: str, file: str) -> None:
        """Ask all nodes to delete a file, without waiting."""
        if self._deletions is not None:
            self._deletions(node, file)

    def tell_deletions(self) -> None:
        """Send pending deletions to the servers while they exist."""
        if self._deletions is not None:
            self._deletions.close()

    def kill(self) -> None:
        import ray

        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        self._lives.clear()
        self._asked.clear()


def node_names(
    nodes: Sequence[Mapping[str, Any]], here: str, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return names for nodes, derived from their host names, so that they are the same in the next
    run.

    Args:
        nodes: Node descriptions from `ray.nodes()`.
        here: Ray's id of this node.
        known: Existing names, which are kept and not used for other nodes.

    Returns:
        Ray's id -> name, for this node, known nodes, and nodes that are alive.
    """
    names = {here: this_node(), **(known or {})}
    for node in sorted(nodes, key=lambda n: (n["NodeManagerHostname"], n["NodeID"])):
        if node["Alive"] and node["NodeID"] not in names:
            base = plain_name(node["NodeManagerHostname"])
            candidates = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
            names[node["NodeID"]] = next(name for name in candidates if name not in names.values())
    return names


# Nodes

NODE_TIMEOUT_S = 5.0
"""[s] Longest wait for a node to accept a connection, when checking whether it is lost."""
CONNECT_TIMEOUT_S = 60.0
"""[s] During a run, longest wait for a node's segment server to start and for all ranks to know
it."""
POLL_S = 0.05
"""[s] Time between two polls while waiting."""


@dataclass
class Process:
    actor: Any
    standing: Any = None
    """Promise of its `Standing`, if it was requested."""
    is_up: bool = False
    """Whether its `Standing` is known."""


@dataclass
class _Arrival:
    """A rank that came up during the run."""

    call: Call
    rank: int
    reply: Reply
    process: Process
    by: float
    """[s] Deadline for it to know the other nodes, and for them to know its node."""

    @property
    def at(self) -> tuple[str, int]:
        return self.call.group.name, self.rank


class NodeLinks:
    """Connects the nodes of a run.

    Args:
        processes: (group, rank) -> its current process.
        died: Describes the process of a rank that died.
        clock: [s] Monotonic clock.
    """

    def __init__(
        self,
        processes: Mapping[tuple[str, int], Process],
        died: Callable[[str, BaseException], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers = SegmentServers()
        self.stands_on: dict[tuple[str, int], str] = {}
        """(group, rank) -> name of its node, also after its process has ended."""
        self.lost: set[str] = set()
        self._used: dict[str, str] = {}
        """Ray's id -> name, for the driver's node and all nodes that ranks are or were on."""
        self._processes, self._died, self._clock = processes, died, clock
        self._files, self._logs = Files(Path()), Path()
        self._arrivals: list[_Arrival] = []
        self._telling: list[Any] = []
        """Promises of ranks that are being told where the servers are."""
        self._by = math.inf
        """[s] Deadline for all ranks to know all nodes, or infinity."""

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes whose segments can be read."""
        return [name for name in self._used.values() if name not in self.lost]

    @property
    def hosts(self) -> Mapping[str, Any]:
        """Node other than the driver's -> the actor that watches its processes."""
        return {name: host for name, host in self.servers.hosts.items() if name != this_node()}

    @property
    def settling(self) -> bool:
        """Whether an answer is still pending."""
        return self._connecting or bool(self._arrivals)

    def begin(self, files: Files, logs: Path, used: Mapping[str, str], timeout_s: float) -> None:
        """Before the run, wait until all ranks know all nodes.

        Args:
            files: Where the nodes keep segments.
            logs: Folder of the run's logs; logs of other nodes are copied there.
            used: Ray's id -> name, for the driver's node and the nodes of all ranks.
            timeout_s: [s] Longest wait.

        Raises:
            WorkerError: A server did not start in time.
        """
        self._files, self._logs, self._used = files, logs, dict(used)
        self._connect()
        self._by, deadline = math.inf, self._clock() + timeout_s
        while self._connecting:
            self._advance(POLL_S)
            if self.servers.take_ended():
                self._connect()
            if self._clock() > deadline:
                raise WorkerError(_not_serving(self.servers.awaited, timeout_s))

    def came_up(self, call: Call, rank: int, reply: Reply) -> None:
        """Note that a rank has answered for the first time, perhaps on a new node. `take` returns
        the answer when the rank can work."""
        process, by = self._processes[call.group.name, rank], self._clock() + CONNECT_TIMEOUT_S
        self._arrivals.append(_Arrival(call, rank, reply, process, by))

    def take(self) -> list[Event]:
        """Process answers of servers and ranks, and restart dead servers.

        Returns:
            Answers of new ranks that can work, and failures of the others.

        Raises:
            WorkerDied: A server did not start in time on a node that the run needs.
        """
        self.servers.look_at_logs()
        if self.servers.take_ended():
            self.look_for_lost()  # do not start a server on a lost node
            self._connect()
        self._advance()
        return self._take_arrivals()

    def look_for_lost(self) -> None:
        if len(self._used) > 1:  # a single node is the driver's
            import ray

            used = [n for n in ray.nodes() if n["NodeID"] in self._used]
            gone = [n["NodeID"] for n in used if not (n["Alive"] and _listens(n))]
            self.lost |= {self._used[id] for id in gone}

    def _connect(self) -> None:
        """Start servers on all used nodes, if there are several, without waiting. `_advance`
        continues."""
        nodes = {id: name for id, name in self._used.items() if name not in self.lost}
        if len(nodes) == 1 and self.servers.peers is None:
            return
        if not self._connecting:
            self._by = self._clock() + CONNECT_TIMEOUT_S
        self.servers.start(self._files, nodes, self._logs.parent)
        self.servers.keep_logs(self._logs)

    @property
    def _connecting(self) -> bool:
        """Whether servers are still starting, or ranks have not been told of them."""
        return bool(self.servers.awaited or self._telling)

    def _advance(self, wait_s: float = 0.0) -> None:
        """Process answers of servers and ranks, and tell ranks of new servers."""
        import ray

        if self.servers.advance(wait_s):
            self._tell(self._processes.values())
        if self._telling:
            _, self._telling = ray.wait(self._telling, num_returns=len(self._telling), timeout=wait_s)
        if self._clock() > self._by:
            self._telling = []  # a hanging rank is found by its call timeout
            coming = {self.stands_on.get(arrival.at) for arrival in self._arrivals}
            if late := [node for node in self.servers.awaited if node not in coming]:
                raise WorkerDied(_not_serving(late, CONNECT_TIMEOUT_S))

    def _tell(self, processes: Iterable[Process]) -> None:
        if self.servers.peers is not None:
            self._telling += [p.actor.connect.remote(self.servers.peers) for p in processes if p.is_up]

    def _take_arrivals(self) -> list[Event]:
        from ray.exceptions import RayError

        events: list[Event] = []
        for arrival in list(self._arrivals):
            reply, over = arrival.reply, True
            if self._processes.get(arrival.at) is arrival.process:  # skip it if it was replaced
                try:
                    over = self._has_arrived(arrival)
                except RayError as error:
                    reply = Reply(
                        failure=Failure(
                            self._died("{}[{}]".format(*arrival.at), error), kind=FailureKind.DIED
                        )
                    )
                if not over and self._clock() > arrival.by:
                    over, reply = (
                        True,
                        Reply(failure=Failure(self._turn_away(arrival), kind=FailureKind.DIED)),
                    )
                if over:
                    events.append(Event(arrival.call, arrival.rank, reply))
            if over:
                self._arrivals.remove(arrival)
        return events

    def _has_arrived(self, arrival: _Arrival) -> bool:
        import ray

        process = arrival.process
        if not process.is_up:
            ready, _ = ray.wait([process.standing], timeout=0)
            if not ready:
                return False
            standing: Standing = ray.get(ready[0])
            self.stands_on[arrival.at], process.is_up = standing.node, True
            if standing.node_id in self._used:
                self._tell([process])
            else:
                self._used[standing.node_id] = standing.node
                self._connect()
        return not self._connecting

    def _turn_away(self, arrival: _Arrival) -> str:
        """Reason that a rank cannot work. If the others cannot reach its node, they continue
        without it."""
        node = self.stands_on.get(arrival.at)
        if node is None or node not in self.servers.awaited:
            return f"it did not connect to the other nodes within {CONNECT_TIMEOUT_S:.0f} s"
        self.servers.forget(node)
        self._used = {id: name for id, name in self._used.items() if name != node}
        self._connect()
        return _not_serving([node], CONNECT_TIMEOUT_S)


def _not_serving(nodes: Collection[str], timeout_s: float) -> str:
    which = f"node{'s' * (len(nodes) > 1)} {', '.join(map(repr, nodes))}"
    return f"the segment server on {which} did not start within {timeout_s:.0f} s, so other nodes could not read its rows"


def _listens(node: Mapping[str, Any]) -> bool:
    """Whether a node accepts connections. Ray itself may take longer to notice a lost node."""
    try:
        socket.create_connection(
            (node["NodeManagerAddress"], node["NodeManagerPort"]), NODE_TIMEOUT_S
        ).close()
    except OSError:
        return False
    return True
