"""The checker's state of the rows of a run, as sets of sample ids.

For each node of a graph, every row in flight of the node's level is in exactly one of four sets:

    waiting ──claim──▶ leased ──publish, finish──▶ done
       │  ◀──release──   │
       └──a filter, a quorum, a loss──▶ dropped

Everything else is computed from these sets when it is needed: what is ready, and which groups are complete. Nothing here is shared
with the ledger, so that a mistake in one of them is not repeated in the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..graph import Graph
from ..node import SOURCE, Node


@dataclass(slots=True, eq=False)
class CheckedRow:
    """One row in flight."""

    id: int
    group: CheckedGroup
    parent: CheckedRow | None
    level: int
    tokens: int
    version: int | None
    """Oldest policy version in it; None where no policy made it."""
    reason: str = ""
    """Why a node will never see it."""
    children: list[CheckedRow] = field(default_factory=list)
    parts: dict[str, Sequence[Any]] | None = None
    """Node -> the segment with the columns that it wrote of this row."""

    def ancestor(self, level: int) -> CheckedRow:
        """The row of a level that this one was made from, or the row itself."""
        row = self
        while row.level != level:
            assert row.parent is not None, f"row {self.id} has no ancestor on level {level}"
            row = row.parent
        return row

    def below(self, level: int) -> list[CheckedRow]:
        """The rows of a level that were made from this one, or the row itself."""
        if self.level == level:
            return [self]
        return [row for child in self.children for row in child.below(level)]

    def age(self, version: int) -> int:
        """Policy versions that the row is behind this one; -1 where no policy made it."""
        return version - self.version if self.version is not None and self.version >= 0 else -1


@dataclass(slots=True, eq=False)
class CheckedGroup:
    """All rows that come from one issued row."""

    id: int
    graph: CheckedGraph
    issued_in: int
    """The step in which it was issued."""
    position: int
    """Position of the issued row in the source."""
    tokens: int
    """Number of tokens of the issued row when it was issued."""
    levels: list[set[int]]
    """The ids of its rows, level by level."""
    trained_in: int | None = None
    """Step of the update that trained it last."""
    ids_aside: dict[tuple[int, int], range] = field(default_factory=dict)
    """(row, level) -> the sample ids that are set aside for the rows of that level made of it."""
    arrived: dict[CheckedNode, dict[int, int]] = field(default_factory=dict)
    """Quorum -> its rows that were ready, each with the number of the record that made it so."""
    chosen: dict[CheckedNode, set[int]] = field(default_factory=dict)
    """Quorum -> the rows that it took."""
    offered_short: set[CheckedNode] = field(default_factory=set)
    """Quorums that may take fewer rows than they ask for."""
    lost: str = ""
    """The fate of a group whose columns became unreadable."""


@dataclass(slots=True, eq=False)
class CheckedNode:
    """A node, with the state of each row in flight of its level."""

    node: Node
    name: str = field(init=False)
    level: int = field(init=False)
    takes_groups: bool = field(init=False)
    quorum: int = field(init=False)
    """How many rows of a group it takes; 0 where it is no quorum."""
    waiting: set[int] = field(default_factory=set)
    """Rows that the node has still to do, ready or not, and that are not leased to it."""
    leased: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    """Rows that the node will never see."""
    cancelled: set[int] = field(default_factory=set)
    """Dropped rows that its quorum went on without."""
    held_back: set[int] = field(default_factory=set)
    """Groups that are too old for it and wait for a larger bound."""
    needs: list[tuple[int, list[CheckedNode]]] = field(default_factory=list)
    """Level -> nodes that must be done with a row, or with its ancestor on that level, before it is ready."""
    needs_above: list[tuple[int, list[CheckedNode]]] = field(default_factory=list)
    """The part of `needs` on other levels."""
    downstream: list[CheckedNode] = field(default_factory=list)
    quorums_after: list[CheckedNode] = field(default_factory=list)
    """Quorums that wait for this node."""
    upstream_only: list[CheckedNode] = field(default_factory=list)
    """Of a quorum: nodes whose results only the quorum, and what comes after it, needs."""
    serves: list[CheckedNode] = field(default_factory=list)
    """Quorums that this node is upstream-only of."""
    own_maker: CheckedNode | None = None
    """Of a quorum: the node that makes its rows, if it makes them for the quorum alone, and for what stands before and after it alone."""

    def __post_init__(self) -> None:
        operation = self.node.operation
        self.name, self.level, self.takes_groups = self.node.name, self.node.level, operation.takes_groups
        self.quorum = operation.quorum.n if operation.quorum else 0

    def is_ready(self, ids: set[int], rows: Mapping[int, CheckedRow]) -> bool:
        """Whether everything that the node comes after is done with these rows, or with those that they were made from."""
        for level, before in self.needs:
            here = ids if level == self.level else {rows[id].ancestor(level).id for id in ids}
            if not all(here <= other.done for other in before):
                return False
        return True

    def misses(self, ids: set[int]) -> bool:
        """Whether it has still to do some of these rows."""
        return not (ids.isdisjoint(self.waiting) and ids.isdisjoint(self.leased))


class CheckedGraph:
    """The nodes of one graph of the run, with their rows."""

    def __init__(self, name: str, graph: Graph) -> None:
        self.name = name
        self.graph = graph
        self.nodes = [CheckedNode(node) for node in graph.nodes]
        self.by_name = {node.name: node for node in self.nodes}
        self.level_names = graph.levels
        self.makers = {n.node.makes_level: n for n in self.nodes if n.node.makes_level is not None}
        self.on_level = [[n for n in self.nodes if n.level == level] for level in sorted(graph.levels)]
        self.updates = any(n.node.operation.updates for n in self.nodes)
        self.last_lease = 0
        for node in self.nodes:
            line = self.line(node.level)
            needs: dict[int, list[CheckedNode]] = {}
            for before in (self.by_name[name] for name in node.node.after):
                if before.node.makes_level not in line:  # else the row exists because that node is done
                    needs.setdefault(before.level, []).append(before)
            node.needs = sorted(needs.items(), key=lambda need: need[0])
            node.needs_above = [need for need in node.needs if need[0] != node.level]
            node.downstream = [n for n in self.nodes if node.name in self._upstream(n, node)]
        for node in self.nodes:
            node.quorums_after = [n for n in self.nodes if n.quorum and any(node in before for _, before in n.needs)]
            if node.quorum:
                self._find_upstream_only(node)

    def line(self, level: int) -> list[int]:
        """This level and those that it was expanded from."""
        return [SOURCE] if level == SOURCE else [level, *self.line(self.makers[level].level)]

    def _users(self, node: CheckedNode) -> set[CheckedNode]:
        return {other for other in self.nodes if node.name in other.node.after}

    def _upstream(self, node: CheckedNode, maker: CheckedNode) -> set[str]:
        """Nodes that must let a row through before it comes to a node. `maker` is not among them for having made it: what it made goes on
        when it makes no more."""
        own = maker.node.makes_level in self.line(node.level)
        names = {name for name in node.node.after if not (own and name == maker.name)}
        return names.union(*(self._upstream(self.by_name[name], maker) for name in names))

    def _find_upstream_only(self, quorum: CheckedNode) -> None:
        served = {quorum, *quorum.downstream}
        for node in reversed(self.nodes):  # recorded before the quorum, or after it on a branch of its own
            users = self._users(node)
            alike = node.level == quorum.level and node.node.makes_level is None and not node.takes_groups
            if node not in served and alike and users and users <= served:
                served.add(node)
                quorum.upstream_only.append(node)
                node.serves.append(quorum)
        maker = self.makers.get(quorum.level)
        if maker is not None and not maker.takes_groups and self._users(maker) <= served:
            quorum.own_maker = maker

    def is_complete(self, group: CheckedGroup, node: CheckedNode) -> bool:
        """Whether no more rows of a group can come to a node: what makes them is done with all that it makes them of."""
        if node.level == SOURCE:
            return True
        maker = self.makers[node.level]
        return self.is_complete(group, maker) and not maker.misses(group.levels[maker.level])

    def is_finished(self, group: CheckedGroup) -> bool:
        """Whether nothing is left to do with a group."""
        return not any(node.misses(group.levels[node.level]) for node in reversed(self.nodes))

    def has_passed(self, row: CheckedRow, before: CheckedNode) -> bool:
        """Whether a node that comes before one of the row's level is done with the row, or with its ancestor."""
        return before.node.makes_level in self.line(row.level) or row.ancestor(before.level).id in before.done

    def state(self, row: CheckedRow) -> str:
        """What a row in flight is: leased, dropped or waiting."""
        nodes = self.on_level[row.level]
        if any(row.id in node.leased for node in nodes):
            return "leased"
        return "dropped" if row.group.lost or any(row.id in node.dropped for node in nodes) else "waiting"

    def dropped_of(self, group: CheckedGroup) -> set[int]:
        """The rows of a group that some node will never see."""
        if group.lost:
            return set().union(*group.levels)
        return set().union(*(group.levels[node.level] & node.dropped for node in self.nodes))

    def forget(self, group: CheckedGroup) -> None:
        for node in self.nodes:
            ids = group.levels[node.level]
            for state in (node.done, node.dropped, node.cancelled):
                state -= ids
            node.held_back.discard(group.id)
