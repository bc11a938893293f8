"""Elastic groups: their ranks join and leave during a run.

    absent ──room for it──> starting ──process is up──> up (gets rows after the weights)
      ^                        │                        │
      └────────────────────────┴─process or node ends───┘

- The rows of a rank that leaves go back to the ledger (`failures.py`). The rank joins again when
  there is room, for example on spot instances.
- The run continues with the ranks that are up. Below `min_ranks` it waits for more, with a
  deadline.
- A rank that failed to start is retried after a pause, which doubles.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from ...dataflow.buffer.sample_buffer import SampleBuffer
from ...dataflow.errors import DeadlineError
from ..backends.backend import Backend
from ..group import Call, WorkerGroup
from ..reports.progress import Progress
from ..request import CallRequest
from .failures import Failures

LOOK_S = 1.0
"""[s] Time between two looks for room."""
PAUSE_S = (1.0, 60.0)
"""[s] First and longest pause before a rank that failed to start is retried."""


class Elastic:
    """Starts absent ranks of elastic groups, and ends a run that has had too few for too long.

    Args:
        backend: knows where there is room.
        start_timeout_s: longest start of a process once there is room for it [s].
    """

    def __init__(
        self,
        backend: Backend,
        groups: Mapping[str, WorkerGroup],
        failures: Failures,
        say: Callable[[str], None],
        start_timeout_s: float,
    ) -> None:
        self._backend = backend
        self._failures = failures
        self._say = say
        self._start_timeout_s = start_timeout_s
        self._cluster = backend.cluster
        self._groups = [g for g in groups.values() if g.place.is_elastic] if self._cluster else []
        self._looked = -math.inf
        self._tries: Counter[tuple[str, int]] = Counter()
        """(group, rank) -> starts since it was last up."""
        self._tried: dict[tuple[str, int], float] = {}
        """(group, rank) -> time of its last start."""
        self._short_since: dict[str, float] = {}
        """Group with too few ranks -> since when."""

    @property
    def waits(self) -> bool:
        """Whether a group has too few ranks, so a run without progress is waiting and not stalled."""
        return any(_is_short(group) for group in self._groups)

    def look(self) -> list[CallRequest]:
        """Once a second, start absent ranks if there is room for them.

        Raises:
            DeadlineError: a group has had too few ranks for too long; names the missing ranks.
        """
        now = self._backend.clock()
        if self._cluster is None or not self._groups or now - self._looked < LOOK_S:
            return []
        self._looked = now
        requests: list[CallRequest] = []
        for group in self._groups:
            for rank in set(group.up) - group.lacking:
                self._tries.pop((group.name, rank), None)
            for rank in sorted(self._cluster.vacant(group)) if group.absent else ():
                requests += self._join(group, rank, now)
            self._check_number(group, now, self._cluster.wait_s)
        return requests

    def _join(self, group: WorkerGroup, rank: int, now: float) -> list[CallRequest]:
        at = group.name, rank
        first_s, longest_s = PAUSE_S
        pause_s = min(longest_s, first_s * 2 ** (self._tries[at] - 1)) if self._tries[at] else 0.0
        if now - self._tried.get(at, -math.inf) < pause_s:
            return []
        self._tries[at] += 1
        self._tried[at] = now
        return self._failures.join(group, rank)

    def _check_number(self, group: WorkerGroup, now: float, wait_s: float) -> None:
        if not _is_short(group):
            if self._short_since.pop(group.name, None) is not None:
                self._say(f"{group.name!r} has enough ranks again: {len(group.up)}")
            return
        limit_s = wait_s + (self._start_timeout_s if group.starting else 0.0)
        missing = [
            f"{group.name}[{rank}] ({'no room for it' if rank in group.absent else 'it is starting'})"
            for rank in range(len(group.mesh))
            if rank not in group.up
        ]
        has = f"{len(group.up)} of at least {group.place.min_ranks} ranks"
        if group.name not in self._short_since:
            self._short_since[group.name] = now
            self._say(
                f"{group.name!r} has {has}; waiting for {', '.join(missing)}, {limit_s:.0f} s at most"
            )
        if now - self._short_since[group.name] > limit_s:
            raise DeadlineError(
                f"group {group.name!r} had {has} for {limit_s:.0f} s (Place(min_ranks={group.place.min_ranks})). Waited for: "
                f"{', '.join(missing)}. RayBackend(wait_s=...) waits longer"
            )


def _is_short(group: WorkerGroup) -> bool:
    return len(group.up) < (group.place.min_ranks or 0)


# Lost nodes of the cluster, with their ranks and rows.
#
# - Ranks of replaceable groups start again on another node. Until then, the other replicas continue.
# - Groups of rows with columns only on the lost node are issued again, and calls on them are released.
# - If a rank cannot be replaced (for example an actor's), the run goes back to its last checkpoint.


class LostNodes:
    """Removes the ranks and rows of lost nodes from a run.

    Args:
        backend: knows the lost nodes, and the nodes of ranks.
        failures: releases rows and replaces ranks.
    """

    def __init__(
        self,
        backend: Backend,
        buffer: SampleBuffer,
        groups: Mapping[str, WorkerGroup],
        failures: Failures,
        progress: Progress,
    ) -> None:
        self._backend = backend
        self._buffer = buffer
        self._groups = groups
        self._failures = failures
        self._progress = progress
        self._said: set[str] = set()
        self._seen: set[str] = set()
        """Lost nodes that `look` has handled."""

    def look(self, under_way: Iterable[Call]) -> list[CallRequest]:
        """Handle nodes that were lost since the last call, and end calls that need rows on them.

        If the run has to go back to its last checkpoint, this does nothing about it: the call that
        finds its rank gone will.

        Args:
            under_way: the current calls of the run.
        """
        cluster = self._backend.cluster
        lost = cluster.lost_nodes(look=False) if cluster is not None else ()
        if self._seen.issuperset(lost):
            return []
        self._seen.update(lost)
        return self.remedy(lost, under_way) or []

    def remedy(self, lost: Collection[str], under_way: Iterable[Call]) -> list[CallRequest] | None:
        """Continue without some nodes. Call it again to drop rows that are published there later.

        Args:
            lost: names of the lost nodes.
            under_way: the current calls of the run.

        Returns:
            Requests that start replacements, or None if the run has to go back to its last
            checkpoint.

        Raises:
            WorkerError: a sample, or a call outside the graph, failed too often, with the ranks
                that worked on it.
        """
        gone = [
            (group, rank, node)
            for group in self._groups.values()
            for rank in group.up
            if (node := self._backend.node_of(group, rank)) in lost
        ]
        if not all(group.handle.worker_class.replaceable for group, *_ in gone):
            return None
        requests: list[CallRequest] = []
        for group, rank, node in gone:
            requests += self._failures.replace(group, rank, f"node {node} is gone")
        nodes = [node for node in self._backend.nodes if node not in lost]
        self._give_back(nodes, list(under_way))
        again = self._buffer.drop_unreachable(nodes)
        for node in sorted(set(lost) - self._said):
            self._said.add(node)
            ranks = sum(at == node for *_, at in gone)
            self._progress.lost_node(
                f"node {node} is gone, with {ranks} ranks; the run continues with the others"
            )
        if again:
            self._progress.say(f"{len(again)} groups with rows on lost nodes are issued again")
        return requests

    def _give_back(self, nodes: Collection[str], calls: Iterable[Call]) -> None:
        """End every call on rows that can no longer be read, except updates."""
        unreachable = self._buffer.unreachable(nodes)
        for call in calls:
            if call.ledger is None or call.lease is None or call.lease.node.operation.updates:
                continue
            groups = unreachable.get(call.ledger.name, {})
            if any(group.id in groups for group in call.lease.groups):
                for rank in sorted(call.waiting):
                    self._failures.give_back(call, rank, "some of its rows were on a node that is gone")
