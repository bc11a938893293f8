"""Lost nodes: how a run goes on when a node of the cluster is gone, with the ranks and the rows on it.

- Ranks of groups that can be replaced come up again on another node. Until then the other replicas go on.
- Groups of rows that have columns only on the lost node are issued again. Calls that work on them give their rows back.
- If a rank cannot be replaced (an actor's, for example), the run goes back to its last checkpoint, as when a process of such a rank ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ...dataflow.buffer.sample_buffer import SampleBuffer
from ..backends.backend import Backend
from ..group import Call, WorkerGroup
from ..request import CallRequest
from ..telling.progress import Progress
from .failures import Failures


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
            self._progress.lost_node(f"node {node} is gone, with {ranks} ranks; the run goes on with the others")
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
