"""Nodes of a run: start a segment server on each node, and tell all ranks where the servers are.

    a rank came up ──on a known node──> it is told where the servers are ───────────────┐
         │                                                                              v
         ├──on a new node──> a server starts there ──> all ranks are told of it ──────> ready
         └──CONNECT_TIMEOUT_S──> its failure, which names the node

During a run, this module never blocks: the driver polls servers and ranks for answers.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.buffer.scratch import notes
from ...dataflow.errors import WorkerDied, WorkerError
from ...dataflow.runs.files import LOGS, make_folder
from ..group import Call
from ..ranks.tasks import Failure, FailureKind, Reply
from .backend import Event, Files, plain_name, this_node
from .process_diagnostics import SAMPLE_S, Memory, ProcessWatch, take_answers
from .rank import Standing, noted_sample

if TYPE_CHECKING:
    from ...dataflow.buffer.flight import Deletions, Peers

_logger = logging.getLogger(__name__)

# Node logs: ranks on machines that do not see the run's directory write their logs next to their
# node's segments. The driver asks the node's segment server for new text every LOG_S, after a rank
# died, and at the end. If a log grows by more than MAX_BYTES between two requests, the driver
# copies only the last MAX_BYTES.


LOG_S = 10.0
"""[s] Interval between requests for new log text."""
MAX_BYTES = 256 << 10
"""[bytes] Maximum text per log in one answer."""
BRING_S = 5.0
"""[s] Longest wait for the last log text of all nodes."""

NewText = Mapping[str, tuple[int, bytes]]
"""Name of a log -> (position of its new text in bytes, new text)."""


def new_text(folder: Path, known: Mapping[str, int]) -> NewText:
    """Return the new text in a folder's logs, at most the last MAX_BYTES of each. `known` maps a
    log to the number of bytes seen."""
    found: dict[str, tuple[int, bytes]] = {}
    for path in sorted(folder.glob("*.log")):
        size, seen = path.stat().st_size, known.get(path.name, 0)
        # A log that became shorter has started anew.
        begin = max(seen if seen <= size else 0, size - MAX_BYTES)
        if size > begin or path.name not in known:
            with path.open("rb") as file:
                file.seek(begin)
                found[path.name] = begin, file.read(size - begin)
    return found


class _NodeLogs:
    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._asked_at = clock()
        self._asked: dict[Any, str] = {}
        self._seen: dict[str, dict[str, int]] = {}
        """Node -> log -> number of bytes copied."""
        self.silent: set[str] = set()
        """Nodes that did not answer in time. `bring` does not wait for them."""

    def look(self, hosts: Mapping[str, Any]) -> None:
        """Store new text that has arrived, and request more every LOG_S. Does not wait."""
        asked = {*self._asked.values()}
        self._store(take_answers(self._asked))
        self.silent -= asked - {*self._asked.values()}
        if self._clock() - self._asked_at >= LOG_S:
            self._ask(hosts)

    def bring(self, hosts: Mapping[str, Any]) -> None:
        """Request new text from all nodes, and wait up to BRING_S for it."""
        # Drop pending requests, because the new answers include their text.
        self._asked = {promise: node for promise, node in self._asked.items() if node in self.silent}
        self._ask(hosts)
        silent = {promise: node for promise, node in self._asked.items() if node in self.silent}
        others = {promise: node for promise, node in self._asked.items() if node not in self.silent}
        self._store([*take_answers(silent), *take_answers(others, BRING_S)])
        self._asked = {**silent, **others}
        self.silent = {*self._asked.values()}

    def _ask(self, hosts: Mapping[str, Any]) -> None:
        self._asked_at = self._clock()
        for node in hosts.keys() - {*self._asked.values()}:
            self._asked[hosts[node].new_text.remote(self._seen.get(node, {}))] = node

    def _store(self, answers: Iterable[tuple[str, NewText]]) -> None:
        for node, found in answers:
            try:
                self.append_text(node, found)
            except (
                OSError
            ) as error:  # such as a full disk: the run continues, and requests the text again
                _logger.warning("the logs of node %s cannot be written for now: %s", node, error)

    def append_text(self, node: str, found: NewText) -> None:
        seen = self._seen.setdefault(node, {})
        for name, (begin, text) in found.items():
            # A name from another machine must not lead out of the folder.
            if Path(name).name != name:
                continue
            make_folder(self._folder)
            path, known = self._folder / name, seen.get(name, 0)
            end = begin + len(text)
            if begin < known <= end:  # an earlier answer had part of the text
                text = text[known - begin :]
            elif begin > known:
                left_out = f"... {begin - known} bytes are left out here; they are on node {node} ...\n"
                text = left_out.encode() + text
            if not path.exists():
                path.touch(mode=0o600)
            with path.open("ab") as file:
                file.write(text)
            seen[name] = end


# Segment servers: with several nodes, each node serves its segments to the others


LOOK_S = 1.0
"""[s] Interval between checks that the servers are alive."""


class _SegmentHost:
    """A Ray actor with a node's segment server, which also watches the run's processes there."""

    def __init__(
        self, files: Files, node: str, host: str, token: str, run: Path, *, encrypted: bool
    ) -> None:
        from ...dataflow.buffer.flight import SegmentServer, make_certificate

        own = make_certificate() if encrypted else None
        folder = files.of_node(node)
        self._logs = folder / LOGS
        self._processes = ProcessWatch(files.logs_of_node(node, run))
        threading.Thread(target=self._take_readings, name="readings", daemon=True).start()
        self.server = SegmentServer(folder, node, host=host, token=token, certificate=own)
        self._certificate = own.certificate if own else None
        self._notes = [f"node {node!r}: {note}" for note in notes(folder)]

    def location(self) -> tuple[str, bytes | None, list[str]]:
        """The server's address, its certificate (None without encryption), and warnings."""
        return self.server.location, self._certificate, self._notes

    def new_text(self, known: Mapping[str, int]) -> NewText:
        return new_text(self._logs, known)

    def sample_at(self, group: str, rank: int) -> int | None:
        return noted_sample(self._logs, group, rank)

    def _take_readings(self) -> None:
        while True:
            self._processes.take_readings()
            time.sleep(SAMPLE_S)

    def memory(self, processes: Mapping[str, int]) -> Memory:
        """Watch these processes (worker -> pid). Return the node's memory, and that of the
        processes watched so far."""
        self._processes.watch(processes)
        return self._processes.memory()

    def stacks(self, processes: Mapping[str, int], whose: Collection[str]) -> dict[str, str]:
        self._processes.watch(processes)
        return self._processes.stacks(whose)

    def ending(self, who: str, *, blamed: bool) -> str:
        return self._processes.ending(who, blamed=blamed)

    def last(self) -> None:
        """Never return. If the process dies, the promise of this call breaks."""
        threading.Event().wait()


class _SegmentServers:
    """The segment servers of a run, one per node. A run on a single node has none."""

    def __init__(self) -> None:
        self.peers: Peers | None = None
        self.deletions: Deletions | None = None
        self.hosts: dict[str, Any] = {}
        """Node name -> its `_SegmentHost` actor; empty if the run has one node."""
        self._lives: dict[Any, str] = {}
        """Promise that breaks when a server dies -> its node."""
        self._asked: dict[Any, str] = {}
        """Promise of a server's address -> its node."""
        self._standing: dict[str, tuple[str, bytes | None, list[str]]] = {}
        """Node name -> address, certificate and warnings of its server."""
        self._looked = 0.0
        """[s] Time of the last check that servers are alive."""
        self._noted: set[str] = set()
        self._token = secrets.token_hex(32)
        self._loopback = True
        """Whether all nodes are on this machine."""

    @property
    def awaited(self) -> list[str]:
        """Nodes whose servers have not reported their addresses."""
        return sorted(self._asked.values())

    def start(self, files: Files, names: Mapping[str, str], run: Path) -> None:
        """Start a server on each new node. Call `advance` until no node is `awaited`. `names` maps
        Ray's id of a node to its name."""
        import ray

        addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
        loopback = len({addresses[id] for id in names}) == 1
        if loopback != self._loopback:  # other machines cannot reach servers on loopback
            self.kill()
        self._loopback = loopback
        for id, name in names.items():
            if name not in self.hosts:
                self._start_on(id, name, files, "127.0.0.1" if loopback else addresses[id], run)
        for name in self.hosts.keys() - set(names.values()):  # lost nodes
            del self.hosts[name]
        self._lives = {life: name for life, name in self._lives.items() if name in self.hosts}
        self._asked = {host.location.remote(): name for name, host in self.hosts.items()}
        self._standing.clear()

    def _start_on(self, id: str, name: str, files: Files, host: str, run: Path) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(id, soft=False)
        remote: Any = ray.remote
        # Two threads, because `last` never returns.
        server = remote(_SegmentHost).options(
            num_cpus=0, scheduling_strategy=strategy, max_concurrency=2
        )
        # Loopback traffic does not leave the machine, so it needs no encryption.
        actor = server.remote(files, name, host, self._token, run, encrypted=not self._loopback)
        self.hosts[name], self._lives[actor.last.remote()] = actor, name

    def advance(self, wait_s: float = 0.0) -> bool:
        """Process the servers' answers. Return whether all have arrived and `peers` are new."""
        if not self._asked:
            return False
        self._standing |= take_answers(self._asked, wait_s)  # `take_ended` finds dead servers
        if self._asked or self._standing.keys() != self.hosts.keys():
            return False
        self._meet()
        return True

    def _meet(self) -> None:
        from ...dataflow.buffer.flight import Deletions, Peers

        for note in dict.fromkeys(note for *_, found in self._standing.values() for note in found):
            if note not in self._noted:
                self._noted.add(note)
                _logger.warning("%s", note)
        self.tell_deletions()
        self.peers = Peers(
            {name: location for name, (location, *_) in self._standing.items()},
            self._token,
            {location: own for location, own, _ in self._standing.values() if own},
        )
        self.deletions = Deletions(self.peers)

    def tell_deletions(self) -> None:
        if self.deletions is not None:
            self.deletions.close()

    def forget(self, name: str) -> None:
        import ray

        if (actor := self.hosts.pop(name, None)) is not None:
            ray.kill(actor)
        self._lives = {life: node for life, node in self._lives.items() if node != name}

    def take_ended(self) -> bool:
        """Forget dead servers, and return whether there were any. Checks at most once every LOOK_S,
        and returns False in between."""
        if not self._lives or time.monotonic() - self._looked < LOOK_S:
            return False
        self._looked = time.monotonic()
        before = {*self._lives.values()}
        take_answers(self._lives)
        ended = before - {*self._lives.values()}
        for name in ended & self.hosts.keys():
            del self.hosts[name]
            _logger.warning("the segment server on node %r has ended and is restarted", name)
        return bool(ended)

    def kill(self) -> None:
        import ray

        for actor in self.hosts.values():
            ray.kill(actor)
        self.hosts.clear()
        self._lives.clear()
        self._asked.clear()


def node_names(
    nodes: Sequence[Mapping[str, Any]], here: str, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return Ray's id -> name for this node, the known nodes, and all live nodes. Names come from
    host names, so a node keeps its name in the next run.

    Args:
        nodes: Node descriptions from `ray.nodes()`.
        here: Ray's id of this node.
        known: Existing names (Ray's id -> name), which stay and are not reused.
    """
    names = {here: this_node(), **(known or {})}
    for node in sorted(nodes, key=lambda n: (n["NodeManagerHostname"], n["NodeID"])):
        if node["Alive"] and node["NodeID"] not in names:
            base = plain_name(node["NodeManagerHostname"])
            candidates = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
            names[node["NodeID"]] = next(name for name in candidates if name not in names.values())
    return names


# NodeLinks: servers, ranks and logs of all nodes

NODE_TIMEOUT_S = 5.0
"""[s] Longest wait for a node to accept a connection; after that, the node counts as lost."""
CONNECT_TIMEOUT_S = 60.0
"""[s] During a run, longest wait until a new segment server is up and all ranks know it."""
POLL_S = 0.05


@dataclass
class Process:
    actor: Any
    standing: Any = None
    """Promise of its `Standing`, if requested."""
    is_up: bool = False


@dataclass
class _Arrival:
    call: Call
    rank: int
    reply: Reply
    process: Process
    by: float
    """[s] Deadline for the rank to know the other nodes, and for other ranks to know its node."""

    @property
    def at(self) -> tuple[str, int]:
        return self.call.group.name, self.rank


class NodeLinks:
    """Connects the nodes of a run.

    Args:
        processes: (group, rank) -> its current process.
        died: Returns a description of a dead process, given its name and error.
    """

    def __init__(
        self,
        processes: Mapping[tuple[str, int], Process],
        died: Callable[[str, BaseException], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers = _SegmentServers()
        self.logs = _NodeLogs(Path())
        self.stands_on: dict[tuple[str, int], str] = {}
        """(group, rank) -> name of its node, even after its process has ended."""
        self.lost: set[str] = set()
        self._used: dict[str, str] = {}
        """Ray's id -> name, for the driver's node and all nodes that ranks are or were on."""
        self._processes, self._died, self._clock = processes, died, clock
        self._files, self._run = Files(Path()), Path()
        self._arrivals: list[_Arrival] = []
        self._telling: list[Any] = []
        """Promises of ranks that are being told where the servers are."""
        self._by = math.inf
        """[s] Deadline for all ranks to know all nodes, or infinity."""

    @property
    def nodes(self) -> list[str]:
        return [name for name in self._used.values() if name not in self.lost]

    @property
    def hosts(self) -> Mapping[str, Any]:
        """Node other than the driver's -> the actor that watches its processes."""
        return {name: host for name, host in self.servers.hosts.items() if name != this_node()}

    @property
    def settling(self) -> bool:
        """Whether a server or a rank has not answered yet."""
        return self._connecting or bool(self._arrivals)

    def connect_all(self, files: Files, run: Path, used: Mapping[str, str], timeout_s: float) -> None:
        """Connect all ranks to all nodes, before the run. Raises a `WorkerError` after `timeout_s`.
        `used` maps Ray's id to the name, for the driver's node and the nodes of all ranks."""
        self._files, self._run, self._used = files, run, dict(used)
        self.logs = _NodeLogs(run / LOGS)
        self._connect()
        self._by, deadline = math.inf, self._clock() + timeout_s
        while self._connecting:
            self._advance(POLL_S)
            if self.servers.take_ended():
                self._connect()
            if self._clock() > deadline:
                raise WorkerError(_not_serving(self.servers.awaited, timeout_s))

    def bring_logs(self) -> None:
        self.logs.bring(self.servers.hosts)

    def sample_at(self, group: str, rank: int) -> int | None:
        """Id of the last sample that a rank recorded on its node, or None if unknown."""
        node = self.stands_on.get((group, rank), "")
        host = self.servers.hosts.get(node)
        if host is None or node in self.lost or node in self.logs.silent:
            return None
        asked = {host.sample_at.remote(group, rank): node}
        answers = take_answers(asked, BRING_S)
        self.logs.silent.update(asked.values())
        return answers[0][1] if answers else None

    def came_up(self, call: Call, rank: int, reply: Reply) -> None:
        """Record that a rank is up. `take_events` returns its reply once it is connected."""
        process, by = self._processes[call.group.name, rank], self._clock() + CONNECT_TIMEOUT_S
        self._arrivals.append(_Arrival(call, rank, reply, process, by))

    def take_events(self) -> list[Event]:
        """Restart dead servers, and return an event for each new rank that is ready or has failed.
        Raises `WorkerDied` if a server that the run needs did not start in time."""
        self.logs.look(self.servers.hosts)
        if self.servers.take_ended():
            self.look_for_lost()  # do not start a server on a lost node
            self._connect()
        self._advance()
        return self._take_arrivals()

    def look_for_lost(self) -> None:
        if len(self._used) > 1:  # a single node is the driver's
            import ray

            used = [n for n in ray.nodes() if n["NodeID"] in self._used]
            self.lost |= {self._used[n["NodeID"]] for n in used if not (n["Alive"] and _listens(n))}

    def _connect(self) -> None:
        """Begin to start servers on all nodes in use, if several; `_advance` completes the
        start."""
        nodes = {id: name for id, name in self._used.items() if name not in self.lost}
        if len(nodes) == 1 and self.servers.peers is None:
            return
        if not self._connecting:
            self._by = self._clock() + CONNECT_TIMEOUT_S
        self.servers.start(self._files, nodes, self._run)

    @property
    def _connecting(self) -> bool:
        """Whether servers are still starting, or ranks have not been told of them."""
        return bool(self.servers.awaited or self._telling)

    def _advance(self, wait_s: float = 0.0) -> None:
        import ray

        if self.servers.advance(wait_s):
            self._tell(self._processes.values())
        if self._telling:
            _, self._telling = ray.wait(self._telling, num_returns=len(self._telling), timeout=wait_s)
        if self._clock() > self._by:
            self._telling = []  # the call timeout finds a hanging rank
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
            if self._processes.get(arrival.at) is not arrival.process:  # it was replaced
                self._arrivals.remove(arrival)
                continue
            failure = None
            try:
                over = self._has_arrived(arrival)
            except RayError as error:
                over, failure = True, self._died("{}[{}]".format(*arrival.at), error)
            if not over and self._clock() > arrival.by:
                over, failure = True, self._turn_away(arrival)
            if over:
                self._arrivals.remove(arrival)
                reply = arrival.reply
                if failure is not None:
                    reply = Reply(failure=Failure(failure, kind=FailureKind.DIED))
                events.append(Event(arrival.call, arrival.rank, reply))
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
        """Return why a rank cannot work. If its node's server did not start, forget the node."""
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
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    try:
        socket.create_connection(address, NODE_TIMEOUT_S).close()
    except OSError:
        return False
    return True
