"""The nodes that the ranks of a run stand on, and that all of them know each other: each serves its segments, and each rank knows where.

    a rank came up ──on a node that is used──> it is told where the servers are ────────────────────┐
         └──on another──> a server starts there ──> all ranks are told where the servers are ──────> it is heard
         └──────────── CONNECT_TIMEOUT_S ────────────> its failure, which names the node

Nothing here waits while a run goes on: what servers and ranks answer is taken when the driver looks.
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


# Node logs
#
# NodeLogs: brings the logs of ranks on machines that do not see the run's directory into it.
#
# Such a rank writes its log beside the segments of its node. The node's server of segments is
# asked for what is new: every LOG_S, when a rank has died, and at the end. A log that grows faster
# than MAX_BYTES between two questions loses the middle, which a line says.


_logger = logging.getLogger(__name__)
LOG_S = 10.0
"""Seconds between two questions for what is new."""
MAX_BYTES = 256 << 10
"""Most bytes of a log in one answer."""
BRING_S = 5.0
"""Longest wait for the last of the logs, of all nodes together."""

NewText = Mapping[str, tuple[int, bytes]]
"""Name of a log -> byte at which the text begins, and the text."""


def new_text(folder: Path, known: Mapping[str, int]) -> NewText:
    """What stands in the logs of a folder behind what is known of them.

    Args:
        folder: it need not exist.
        known: name of a log -> bytes that were seen.

    Returns:
        Of each log that is new or has grown; the last MAX_BYTES at most.
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
    """The logs of other machines, in the run's directory.

    Args:
        folder: of the logs in the run's directory.
        clock: seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._asked_at = clock()
        self._asked: dict[Any, str] = {}
        """Promise of new text -> its node."""
        self._seen: dict[str, dict[str, int]] = {}
        """Node -> log -> bytes that were brought."""
        self.silent: set[str] = set()
        """Nodes that did not answer in time. Nobody waits for them again before they have answered."""

    def look(self, hosts: Mapping[str, Any]) -> None:
        """Take what has come, and ask again when it is time. Waits for nobody.

        Args:
            hosts: node -> the actor that reads its logs.
        """
        self._take_ready(0.0, list(self._asked))
        if self._clock() - self._asked_at >= LOG_S:
            self._ask(hosts)

    def bring(self, hosts: Mapping[str, Any]) -> None:
        """Bring what is there now, waiting no longer than BRING_S for all nodes together."""
        # What was asked for before may be older; the new answer has its text, too.
        self._asked = {promise: node for promise, node in self._asked.items() if node in self.silent}
        self._ask(hosts)
        self._take_ready(0.0, [promise for promise, node in self._asked.items() if node in self.silent])
        late = self._take_ready(
            BRING_S, [promise for promise, node in self._asked.items() if node not in self.silent]
        )
        self.silent |= {self._asked[promise] for promise in late}

    def _ask(self, hosts: Mapping[str, Any]) -> None:
        """Ask the nodes that have answered what they were asked before."""
        self._asked_at = self._clock()
        for node in hosts.keys() - {*self._asked.values()}:
            self._asked[hosts[node].new_text.remote(self._seen.get(node, {}))] = node

    def _take_ready(self, wait_s: float, promises: list[Any]) -> list[Any]:
        """Take what has come of some promises; returns the others."""
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
            except RayError:  # its server has ended, and is started again
                continue
            except OSError as error:  # the disk is full, say: no reason to end a run
                _logger.warning("the logs of node %s cannot be written for now: %s", node, error)

    def add(self, node: str, found: NewText) -> None:
        """Append new text of a node to the logs in the run's directory.

        Raises:
            OSError: the disk is full, say. What is missing comes with a later answer.
        """
        seen = self._seen.setdefault(node, {})
        for name, (begin, text) in found.items():
            if Path(name).name != name:
                continue
            make_folder(self._folder)
            path, known = self._folder / name, seen.get(name, 0)
            end = begin + len(text)
            if begin < known <= end:  # two answers hold it
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


# Segment servers
#
# The nodes of a run, where there are several: what they are called, and the servers through which
# each reads the others' segments.


LOOK_S = 1.0
"""Seconds between two looks whether the servers live."""
logger = logging.getLogger(__name__)


class SegmentHost:
    """The server of one node's segments, in its Ray actor process."""

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
        if (
            loopback != self._loopback
        ):  # those that listen on loopback alone are of no use to another machine
            self.kill()
        self._loopback = loopback
        for id, name in names.items():
            if name not in self._actors:
                self._actors[name] = self._start(
                    files, id, name, "127.0.0.1" if loopback else addresses[id], run
                )
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


def node_names(
    nodes: Sequence[Mapping[str, Any]], here: str, known: Mapping[str, str] | None = None
) -> dict[str, str]:
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


NODE_TIMEOUT_S = 5.0
"""Longest wait for a node to accept a connection, when a process is gone, or rows cannot be read."""
CONNECT_TIMEOUT_S = 60.0
"""Longest wait, while the run goes on, for the server of segments of a node, and for all ranks to know it."""
POLL_S = 0.05
"""Seconds between two looks while somebody is waited for."""


@dataclass
class Process:
    """The process of a rank."""

    actor: Any
    standing: Any = None
    """Promise of where it stands, if it was asked."""
    is_up: bool = False
    """It is known where it stands."""


@dataclass
class _Arrival:
    """A rank that came up while the run goes on."""

    call: Call
    """What it answered first."""
    rank: int
    reply: Reply
    process: Process
    by: float
    """When it has to know the other nodes, and they its own."""

    @property
    def at(self) -> tuple[str, int]:
        return self.call.group.name, self.rank


class NodeLinks:
    """Connects the nodes of a run.

    Args:
        processes: (group, rank) -> its process, as it is now.
        died: describes the process of a rank that died.
        clock: seconds, which only grow.
    """

    def __init__(
        self,
        processes: Mapping[tuple[str, int], Process],
        died: Callable[[str, BaseException], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers = SegmentServers()
        self.stands_on: dict[tuple[str, int], str] = {}
        """(group, rank) -> name of its node, also when its process is gone."""
        self.lost: set[str] = set()
        """Names of nodes that are gone."""
        self._used: dict[str, str] = {}
        """Ray's id -> name in references, of the nodes that ranks stand on, or stood on, and the driver's."""
        self._processes, self._died, self._clock = processes, died, clock
        self._files, self._logs = Files(Path()), Path()
        self._arrivals: list[_Arrival] = []
        self._telling: list[Any] = []
        """Promises of ranks to know where the servers are."""
        self._by = math.inf
        """When all ranks have to know all nodes, if some do not."""

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes on which segments can be read."""
        return [name for name in self._used.values() if name not in self.lost]

    @property
    def hosts(self) -> Mapping[str, Any]:
        """Other node than the driver's -> the actor that watches the processes there."""
        return {name: host for name, host in self.servers.hosts.items() if name != this_node()}

    @property
    def settling(self) -> bool:
        """Whether somebody is waited for who did not answer yet."""
        return self._connecting or bool(self._arrivals)

    def begin(self, files: Files, logs: Path, used: Mapping[str, str], timeout_s: float) -> None:
        """Wait, before the run begins, until all ranks know all nodes.

        Args:
            files: where the nodes keep segments.
            logs: folder of the run's logs, into which those of other nodes are brought.
            used: Ray's id -> name, of the nodes that ranks stand on, and the driver's.
            timeout_s: longest wait.

        Raises:
            WorkerError: a server did not start in time.
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
        """A rank answered for the first time, perhaps on another node than before; `take` returns the answer when it can work."""
        process, by = self._processes[call.group.name, rank], self._clock() + CONNECT_TIMEOUT_S
        self._arrivals.append(_Arrival(call, rank, reply, process, by))

    def take(self) -> list[Event]:
        """Take what servers and ranks have answered, and start servers again that have ended.

        Returns:
            The answers of ranks that came up and can work now, and the failures of those that cannot.

        Raises:
            WorkerDied: a server did not start in time, on a node that the run goes on with.
        """
        self.servers.look_at_logs()
        if self.servers.take_ended():
            self.look_for_lost()  # else a server would be started on a node that is gone, too
            self._connect()
        self._advance()
        return self._take_arrivals()

    def look_for_lost(self) -> None:
        """Ask the nodes whether they are there."""
        if len(self._used) > 1:  # else it is the driver's own
            import ray

            used = [n for n in ray.nodes() if n["NodeID"] in self._used]
            gone = [n["NodeID"] for n in used if not (n["Alive"] and _listens(n))]
            self.lost |= {self._used[id] for id in gone}

    def _connect(self) -> None:
        """Have every node that is used serve its segments, if there are several. Returns at once: `_advance` goes on with it."""
        nodes = {id: name for id, name in self._used.items() if name not in self.lost}
        if len(nodes) == 1 and self.servers.peers is None:
            return
        if not self._connecting:
            self._by = self._clock() + CONNECT_TIMEOUT_S
        self.servers.start(self._files, nodes, self._logs.parent)
        self.servers.keep_logs(self._logs)

    @property
    def _connecting(self) -> bool:
        """Whether servers are still starting, or ranks have still to be told of them."""
        return bool(self.servers.awaited or self._telling)

    def _advance(self, wait_s: float = 0.0) -> None:
        """Take what servers and ranks have answered, and tell the ranks of new servers."""
        import ray

        if self.servers.advance(wait_s):
            self._tell(self._processes.values())
        if self._telling:
            _, self._telling = ray.wait(self._telling, num_returns=len(self._telling), timeout=wait_s)
        if self._clock() > self._by:
            self._telling = []  # who hangs is found by his silence
            coming = {self.stands_on.get(arrival.at) for arrival in self._arrivals}
            if late := [node for node in self.servers.awaited if node not in coming]:
                raise WorkerDied(_not_serving(late, CONNECT_TIMEOUT_S))

    def _tell(self, processes: Iterable[Process]) -> None:
        """Tell the ranks that are up where the servers are."""
        if self.servers.peers is not None:
            self._telling += [p.actor.connect.remote(self.servers.peers) for p in processes if p.is_up]

    def _take_arrivals(self) -> list[Event]:
        from ray.exceptions import RayError

        events: list[Event] = []
        for arrival in list(self._arrivals):
            reply, over = arrival.reply, True
            if self._processes.get(arrival.at) is arrival.process:  # else it was replaced in turn
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
        """Whether a rank that came up can work."""
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
        """Why a rank cannot work. If the others cannot reach its node, they go on without it."""
        node = self.stands_on.get(arrival.at)
        if node is None or node not in self.servers.awaited:
            return f"it did not get to know the other nodes within {CONNECT_TIMEOUT_S:.0f} s"
        self.servers.forget(node)
        self._used = {id: name for id, name in self._used.items() if name != node}
        self._connect()
        return _not_serving([node], CONNECT_TIMEOUT_S)


def _not_serving(nodes: Collection[str], timeout_s: float) -> str:
    which = f"node{'s' * (len(nodes) > 1)} {', '.join(map(repr, nodes))}"
    return f"the server of segments on {which} did not start within {timeout_s:.0f} s: the others could not read rows of it"


def _listens(node: Mapping[str, Any]) -> bool:
    """Whether the node is there; the cluster itself may take a while to notice that it is not."""
    try:
        socket.create_connection(
            (node["NodeManagerAddress"], node["NodeManagerPort"]), NODE_TIMEOUT_S
        ).close()
    except OSError:
        return False
    return True
