"""Wiring: how the nodes of a graph depend on each other, as the ledger needs it. Nodes are numbers: their places in `graph.nodes`."""

from __future__ import annotations

from ..graph import Graph
from ..node import SOURCE, Node
from .rows import Group, Row, mask_of


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
        self.above = [SOURCE, *(graph.parent_level(lv) for lv in range(1, self.num_levels))]
        """Level -> the level of the rows that its rows are made of."""
        needs = [self._needs(n) for n in nodes]
        self.needs_of_row = [[j for lv, j in needs[i] if lv == n.level] for i, n in enumerate(nodes)]
        """For each node, those that must be done with a row before the row is ready."""
        self.needs_above = [[(lv, j) for lv, j in needs[i] if lv != n.level] for i, n in enumerate(nodes)]
        """For each node, (level, node) of those that must be done with an ancestor of the row."""
        self.first_on_level = [[i for i in own if not self.needs_of_row[i]] for own in self.on_level]
        """Level -> its nodes that a new row may be ready for."""
        self.may_be_cut_off = [any(self.needs_above[i] for i in own) for own in self.on_level]
        """Level -> whether one of its nodes waits for something to be done with an ancestor of its rows."""
        self.behind_on_level = [sum(self.behind[i] for i in own) for own in self.on_level]
        """Level -> how many of its nodes follow behind."""
        self.then = [[j for j, m in enumerate(nodes) if n.name in m.after and n.makes_level != m.level] for n in nodes]
        """For each node, the nodes that a row may become ready for when it is done: on the row's level, and on deeper ones."""
        self.downstream = [self._downstream(n) for n in nodes]
        """For each node, the nodes that see only the rows that it lets through: its dependents, and theirs. The nodes that see the rows it
        makes are not included: existing rows go on when it makes no more."""
        self.upstream_only = [self._upstream_only(i) if self.quorum[i] else [] for i in range(len(nodes))]
        """For each quorum, the nodes of its level whose results are only used by it and by what comes after it."""
        self.served = [[i for i, own in enumerate(self.upstream_only) if j in own] for j in range(len(nodes))]
        """For each node, the quorums that it is upstream-only of."""
        self.makes_for = [self._makes_for(i) if self.quorum[i] else None for i in range(len(nodes))]
        """For each quorum, the node that makes its rows, if only the quorum, its upstream-only nodes and what comes after it use them."""

    def ends_in_quorum(self, i: int) -> bool:
        """Whether rows that node i finishes may become ready for a quorum, which takes them in the order in which they do."""
        return any(self.quorum[j] for j in self.then[i])

    def through_above(self, group: Group, i: int, mask: int) -> int:
        """Those of these rows with whose ancestors all nodes are done that node i waits for."""
        for level, j in self.needs_above[i]:
            mask &= self.below(group, level, group.levels[level].done[j], self.level[i])
        return mask

    def cut_off(self, group: Group, i: int) -> int:
        """Mask of the rows of which node i waits for a node that will never be done with an ancestor."""
        mask = 0
        for level, j in self.needs_above[i]:
            mask |= self.below(group, level, group.levels[level].skipped[j], self.level[i])
        return mask

    def has_passed(self, row: Row, name: str) -> bool:
        """Whether a node is done with a row or its ancestor."""
        node = self.graph[name]
        if self._makes_ancestor(node, row.level):
            return True
        owner = row.ancestor(node.level)
        return bool(owner.group.levels[owner.level].done[self.index[name]] >> owner.place & 1)

    def below(self, group: Group, level: int, mask: int, made: int) -> int:
        """Mask of the rows of the level `made` that come from these rows of a level: the rows themselves, or their descendants."""
        path: list[int] = []
        while made not in (SOURCE, level):
            path.append(made)
            made = self.above[made]
        if made != level:
            return 0
        for lower in reversed(path):
            rows = group.levels[lower]
            if mask == group.levels[rows.above].all:
                mask = rows.all
            elif mask:
                mask = mask_of([place for place, parent in enumerate(rows.parents) if mask >> parent & 1])
        return mask

    def _needs(self, node: Node) -> list[tuple[int, int]]:
        """Level and number of the nodes that must be done with a row, or its ancestor, before the row is ready for a node."""
        found: set[tuple[int, int]] = set()
        for name in node.after:
            before = self.graph[name]
            if before.makes_level != node.level and not self._makes_ancestor(before, node.level):
                found.add((before.level, self.index[name]))
        return sorted(found)

    def _makes_ancestor(self, node: Node, level: int) -> bool:
        while level != SOURCE:
            if node.makes_level == level:
                return True  # the row exists, so this node made it
            level = self.above[level]
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
