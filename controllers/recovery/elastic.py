"""Elastic groups: their ranks join and leave while a run goes on.

    absent ──room for it──> starting ──its process is up──> up (after the weights that it lacks, it gets rows)
      ^                        │                            │
      └────────────────────────┴──its process or node ends──┘

- What a rank held when it left goes back to the ledger (`failures.py`), and it joins again when there is room: spot instances come and go.
- The run goes on with the ranks that are up. With fewer than `min_ranks` of them it waits for more, with a deadline.
- A rank that did not come up is tried again after a pause, which doubles.
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
"""Seconds between two looks for room."""
PAUSE_S = (1.0, 60.0)
"""Seconds before a rank is started again that did not come up: the first time, and at most."""


class Elastic:
    """Has absent ranks of elastic groups join, and ends a run that has had too few of them for too long.

    Args:
        backend: knows where there is room.
        groups: the worker groups of the run, by name.
        failures: starts the ranks.
        say: tells the user what is waited for.
        start_timeout_s: how long a process may take to be up, once there is room for it.
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
        self._groups = [group for group in groups.values() if group.place.is_elastic]
        self._looked = -math.inf
        self._tries: Counter[tuple[str, int]] = Counter()
        """Group and rank -> how often it was started since it was up last."""
        self._tried: dict[tuple[str, int], float] = {}
        """The same -> when it was started last."""
        self._short_since: dict[str, float] = {}
        """Group with fewer ranks than it needs -> since when."""

    @property
    def waits(self) -> bool:
        """Whether a group has fewer ranks than it needs, so that a run in which nothing can move is not stalled."""
        return any(_is_short(group) for group in self._groups)

    def look(self) -> list[CallRequest]:
        """Once a second, start absent ranks for which there is room.

        Raises:
            DeadlineError: a group has had too few ranks for too long; the message names those that are missing.
        """
        now = self._backend.clock()
        if not self._groups or now - self._looked < LOOK_S:
            return []
        self._looked = now
        requests: list[CallRequest] = []
        for group in self._groups:
            for rank in set(group.up) - group.lacking:
                self._tries.pop((group.name, rank), None)
            for rank in sorted(self._backend.vacant(group)) if group.absent else ():
                requests += self._join(group, rank, now)
            self._check_number(group, now)
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

    def _check_number(self, group: WorkerGroup, now: float) -> None:
        if not _is_short(group):
            if self._short_since.pop(group.name, None) is not None:
                self._say(f"{group.name!r} has the ranks that it needs again: {len(group.up)}")
            return
        limit_s = self._backend.wait_s + (self._start_timeout_s if group.starting else 0.0)
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


# Lost nodes
#
# Lost nodes: how a run goes on when a node of the cluster is gone, with the ranks and the rows on
# it.
#
# - Ranks of groups that can be replaced come up again on another node. Until then the other replicas go on.
# - Groups of rows that have columns only on the lost node are issued again. Calls that work on them give their rows back.
# - If a rank cannot be replaced (an actor's, for example), the run goes back to its last checkpoint, as when a process of such a rank ends.


class LostNodes:
    """Takes the ranks and rows of lost nodes out of a run that goes on.

    Args:
        backend: knows which nodes are gone, and where ranks stand.
        buffer: the rows of the run.
        groups: its worker groups, by name.
        failures: gives rows back and has ranks replaced.
        progress: tells the user what was done.
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
        """Go on without the nodes that were lost since the last call. Calls that wait for rows on such a node end, so none is waited for.
        This method does not take the run back to its last checkpoint. The call that finds its rank gone does that.

        Args:
            under_way: the calls of the run.
        """
        lost = self._backend.lost_nodes(look=False)
        if self._seen.issuperset(lost):
            return []
        self._seen.update(lost)
        return self.remedy(lost, under_way) or []

    def remedy(self, lost: Collection[str], under_way: Iterable[Call]) -> list[CallRequest] | None:
        """Go on without some nodes. Rows that are published on such a node later are dropped by the next call of this method.

        Args:
            lost: the names of the nodes that are gone.
            under_way: the calls of the run.

        Returns:
            Requests that start the replacements; None: the run has to go back to its last checkpoint.

        Raises:
            WorkerError: a sample, or a call outside the graph, failed too often, with the ranks that worked on it.
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
                f"node {node} is gone, with {ranks} ranks; the run goes on with the others"
            )
        if again:
            self._progress.say(f"{len(again)} groups whose rows lay there are issued again")
        return requests

    def _give_back(self, nodes: Collection[str], calls: Iterable[Call]) -> None:
        """End every call that works on rows which can no longer be read. Updates go on."""
        unreachable = self._buffer.unreachable(nodes)
        for call in calls:
            if call.ledger is None or call.lease is None or call.lease.node.operation.updates:
                continue
            groups = unreachable.get(call.ledger.name, {})
            if any(group.id in groups for group in call.lease.groups):
                for rank in sorted(call.waiting):
                    self._failures.give_back(call, rank, "rows of it lay on a node that is gone")
