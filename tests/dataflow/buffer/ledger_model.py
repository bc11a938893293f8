"""A model of the rows that each node can claim, from the independent checker's states."""

import math

from weft.dataflow.buffer.log_rules import Checker
from weft.dataflow.buffer.logged_rows import GraphCounts, LoggedGroup, LoggedNode, LoggedRow
from weft.dataflow.buffer.staleness import Staleness
from weft.dataflow.graph import Graph, Node
from weft.dataflow.runs.log import Log, LogReader, graph_record


class Model:
    """The checker knows the state of each row, and rejects illegal records. This follows the log.

    Readiness follows from these states, except for deadlines of quorums, which the log does not
    contain.
    """

    def __init__(self, graph: Graph, log: Log) -> None:
        self.checker = Checker()
        self.checker.feed(graph_record(graph.name, graph.outline()))
        self.graph = self.checker.graphs[graph.name]
        self.short: set[tuple[int, str]] = set()
        """(Group, node) with a quorum whose deadline has passed, so that it takes the rows that are
        ready."""
        self._log, self._reader = log, LogReader(log.path)

    def read(self) -> None:
        """Read new records of the ledger, which must break no rule."""
        self._log.commit()
        for record in self._reader:
            violations = self.checker.feed(record, self._reader.end.offset)
            assert not violations, "\n".join(map(str, violations))
        assert self._reader.end == self._log.position

    @property
    def rows(self) -> dict[int, LoggedRow]:
        return self.checker.rows.in_flight

    @property
    def groups(self) -> dict[int, LoggedGroup]:
        return self.checker.rows.groups

    @property
    def counts(self) -> GraphCounts:
        return self.checker.rows.counts()[self.graph.name]

    def states(self, n: Node) -> LoggedNode:
        return self.graph.by_name[n.name]

    def todo(self, group: LoggedGroup, n: Node) -> set[int]:
        node = self.states(n)
        return group.levels[node.level] & (node.waiting | node.leased)

    def is_complete(self, group: LoggedGroup, n: Node) -> bool:
        return self.graph.is_complete(group, self.states(n))

    def is_claimed(self, group: LoggedGroup, n: Node) -> bool:
        node = self.states(n)
        return bool(group.levels[node.level] & (node.leased | node.done))

    def ready(self, group: LoggedGroup, n: Node) -> tuple[int, list[int]]:
        """Return how many rows of a group a claim gets, and the candidates.

        A quorum leaves some rows. The checker judges which of them were ready first.
        """
        node, todo = self.states(n), self.todo(group, n)
        if group.id in node.held_back or not todo:
            return 0, []
        if node in group.chosen:
            return (0, []) if todo & node.leased else (len(todo), sorted(todo))
        ready = [id for id in sorted(todo - node.leased) if node.is_ready({id}, self.rows)]
        complete = len(ready) == len(todo) and self.is_complete(group, n)
        if node.quorum:
            enough = len(ready) >= node.quorum or complete or (group.id, n.name) in self.short
            return (min(len(ready), node.quorum), ready) if enough else (0, [])
        return (len(ready), ready) if complete or not node.takes_groups else (0, [])

    def oldest(self, ids: list[int]) -> float:
        """Return the oldest policy version in these rows."""
        versions = (self.rows[id].version for id in ids)
        return min((v for v in versions if v is not None and v >= 0), default=math.inf)

    def too_old(self, group: LoggedGroup, n: Node, staleness: Staleness) -> set[int]:
        return {
            id for id in self.todo(group, n) if self.rows[id].age(staleness.version) > staleness.bound
        }
