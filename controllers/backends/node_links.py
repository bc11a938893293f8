"""The nodes that the ranks of a run stand on, and that all of them know each other: each serves its segments, and each rank knows where.

    a rank came up ──on a node that is used──> it is told where the servers are ────────────────────┐
         └──on another──> a server starts there ──> all ranks are told where the servers are ──────> it is heard
         └──────────── CONNECT_TIMEOUT_S ────────────> its failure, which names the node

Nothing here waits while a run goes on: what servers and ranks answer is taken when the driver looks.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...dataflow.errors import WorkerDied, WorkerError
from ..group import Call
from ..ranks.tasks import Failure, FailureKind, Reply
from .backend import Event, Files, this_node
from .rank import Standing
from .segment_servers import SegmentServers

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
                        failure=Failure(self._died("{}[{}]".format(*arrival.at), error), kind=FailureKind.DIED)
                    )
                if not over and self._clock() > arrival.by:
                    over, reply = True, Reply(failure=Failure(self._turn_away(arrival), kind=FailureKind.DIED))
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
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), NODE_TIMEOUT_S).close()
    except OSError:
        return False
    return True
