"""Wiring: how the nodes of a graph depend on each other, as the ledger needs it. Nodes are numbers: their places in `graph.nodes`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..graph import Graph
from ..node import SOURCE, Node
from .rows import Row


class Wiring:
    """What the structure of a graph implies. Lists are indexed by node or by level; bit i of a mask is node i."""

    def __init__(self, graph: Graph) -> None:
        nodes = graph.nodes
        self.graph = graph
        self.index = {n.name: i for i, n in enumerate(nodes)}
        self.level = [n.level for n in nodes]
        self.num_levels = max([SOURCE, *(n.makes_level for n in nodes if n.makes_level is not None)]) + 1
        self.maker = {n.makes_level: i for i, n in enumerate(nodes) if n.makes_level is not None}
        """Level -> the node that makes its rows."""
        self.on_level = [[i for i, n in enumerate(nodes) if n.level == lv] for lv in range(self.num_levels)]
        self.takes_groups = [n.operation.takes_groups for n in nodes]
        self.behind = [n.operation.behind for n in nodes]
        self.quorum = [n.operation.quorum.n if n.operation.quorum else 0 for n in nodes]
        """Number of rows in each node's quorum; 0 for a node without one."""
        self.updates = [i for i, n in enumerate(nodes) if n.operation.updates]
        self._parent_level = {lv: graph.parent_level(lv) for lv in range(1, self.num_levels)}
        self.needs = [self._needs(n) for n in nodes]
        """For each node, (level, mask of nodes of that level) that must be done with a row before the row is ready."""
        self.needs_of_row = [sum(m for lv, m in self.needs[i] if lv == n.level) for i, n in enumerate(nodes)]
        """For each node, the mask of those that must be done with the row itself."""
        self.needs_above = [any(lv != n.level for lv, _ in self.needs[i]) for i, n in enumerate(nodes)]
        """For each node, whether others must be done with an ancestor of the row."""
        self.first_on_level = [
            [i for i in own if not any(level == lv for level, _ in self.needs[i])]
            for lv, own in enumerate(self.on_level)
        ]
        """Level -> its nodes that a new row may be ready for."""
        self.behind_on_level = [sum(self.behind[i] for i in own) for own in self.on_level]
        """Level -> how many of its nodes follow behind."""
        self.then = [[j for j, m in enumerate(nodes) if n.name in m.after and n.makes_level != m.level] for n in nodes]
        """For each node, the nodes that a row may become ready for when it is done: on the row's level, and on deeper ones."""
        self.downstream = [self._downstream(n) for n in nodes]
        """For each node, the nodes that see only the rows that it lets through: its dependents, and theirs. The nodes that see the rows it
        makes are not included: existing rows go on when it makes no more."""
        self.upstream_only = [self._upstream_only(i) if self.quorum[i] else [] for i in range(len(nodes))]
        """For each quorum, the nodes of its level whose results are only used by it and by what comes after it."""
        self.serves = [sum(1 << i for i, own in enumerate(self.upstream_only) if j in own) for j in range(len(nodes))]
        """For each node, the mask of the quorums that it is upstream-only of."""
        self.makes_for = [self._makes_for(i) if self.quorum[i] else None for i in range(len(nodes))]
        """For each quorum, the node that makes its rows, if only the quorum, its upstream-only nodes and what comes after it use them."""

    def is_ready(self, row: Row, i: int) -> bool:
        """Whether all nodes that node i waits for are done with a row and its ancestors."""
        for level, mask in self.needs[i]:
            owner = row if level == row.level else row.ancestor(level)
            if owner.done & mask != mask:
                return False
        return True

    def is_cut_off(self, row: Row, i: int) -> bool:
        """Whether node i waits for a node that will never be done with an ancestor of the row."""
        return any(level != row.level and row.ancestor(level).skipped & mask for level, mask in self.needs[i])

    def has_passed(self, row: Row, name: str) -> bool:
        """Whether a node is done with a row or its ancestor."""
        node = self.graph[name]
        if self._makes_ancestor(node, row.level):
            return True
        return bool(row.ancestor(node.level).done >> self.index[name] & 1)

    def descendants(self, row: Row, level: int) -> Iterable[Row]:
        """The rows of a level that were made from this row: the row itself, or its descendants."""
        if row.level == level:
            return (row,)
        path = [level]
        while path[-1] != SOURCE and path[-1] != row.level:
            path.append(self._parent_level[path[-1]])
        if path[-1] != row.level:
            return ()
        rows = [row]
        for below in reversed(path[:-1]):
            rows = [c for r in rows for c in r.children or () if c.level == below]
        return rows

    def _needs(self, node: Node) -> list[tuple[int, int]]:
        masks: Counter[int] = Counter()
        for name in node.after:
            before = self.graph[name]
            if before.makes_level != node.level and not self._makes_ancestor(before, node.level):
                masks[before.level] |= 1 << self.index[name]
        return sorted(masks.items())

    def _makes_ancestor(self, node: Node, level: int) -> bool:
        while level != SOURCE:
            if node.makes_level == level:
                return True  # the row exists, so this node made it
            level = self._parent_level[level]
        return False

    def _downstream(self, node: Node) -> list[int]:
        reached = {node.name}
        for other in self.graph.nodes:  # recorded in an order in which dependencies come first
            made = self._makes_ancestor(node, other.level)
            if any(a in reached and not (a == node.name and made) for a in other.after):
                reached.add(other.name)
        return [self.index[name] for name in reached if name != node.name]

    def _users(self, node: Node) -> set[int]:
        return {k for k, m in enumerate(self.graph.nodes) if node.name in m.after}

    def _upstream_only(self, i: int) -> list[int]:
        served = {i, *self.downstream[i]}
        found: list[int] = []
        for j in reversed(range(len(self.graph.nodes))):  # recorded before node i or after it, on a branch of its own
            node = self.graph.nodes[j]
            users = self._users(node)
            alike = node.level == self.graph.nodes[i].level and node.makes_level is None and not self.takes_groups[j]
            if j not in served and alike and users and users <= served:
                served.add(j)
                found.append(j)
        return found

    def _makes_for(self, i: int) -> int | None:
        j = self.maker.get(self.graph.nodes[i].level)
        if j is None or self.takes_groups[j]:
            return None
        alone = self._users(self.graph.nodes[j]) <= {i, *self.downstream[i], *self.upstream_only[i]}
        return j if alone else None
