"""Rows in flight, rebuilt from the events of a log. This module shares no code with the ledger, so
that a bug in one does not hide in the other. The checker (`log_rules.py`) compares events with
these rows.

At each node of its level, a row in flight is in exactly one of four sets:

    waiting ──claim──▶ leased ──publish, finish──▶ done
       │  ◀──release──   │
       └──a filter, a quorum, a loss──▶ dropped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..graph import SOURCE, Graph, Node
from ..runs.log import Record
from .rows import MAX_CHILDREN

# Graphs and nodes


@dataclass(slots=True, eq=False)
class LoggedRow:
    id: int
    group: LoggedGroup
    parent: LoggedRow | None
    level: int
    tokens: int
    version: int | None
    """Policy version of the row; None if no policy generated it."""
    reason: str = ""
    """Why a node dropped the row; empty if none did."""
    children: list[LoggedRow] = field(default_factory=list)
    parts: dict[str, Sequence[Any]] | None = None
    """Maps each node to the segment with the columns that it wrote."""

    def ancestor(self, level: int) -> LoggedRow:
        """Return the ancestor of this row on a level, or the row itself if that is its level."""
        row = self
        while row.level != level:
            assert row.parent is not None, f"row {self.id} has no ancestor on level {level}"
            row = row.parent
        return row

    def below(self, level: int) -> list[LoggedRow]:
        """Return the descendants of this row on a level, or the row itself if that is its level."""
        if self.level == level:
            return [self]
        return [row for child in self.children for row in child.below(level)]

    def age(self, version: int) -> int:
        """Return by how many versions the row is behind `version`; -1 if no policy generated it."""
        return version - self.version if self.version is not None and self.version >= 0 else -1


@dataclass(slots=True, eq=False)
class LoggedGroup:
    id: int
    graph: LoggedGraph
    issued_in: int
    position: int
    tokens: int
    levels: list[set[int]]
    """Sample ids on each level."""
    trained_in: int | None = None
    ids_aside: dict[tuple[int, int], range] = field(default_factory=dict)
    """Sample ids reserved for a row's children on a level, keyed by (sample id, level)."""
    arrived: dict[LoggedNode, dict[int, int]] = field(default_factory=dict)
    """For each node with a quorum: sample id -> number of the log record that made the row
    ready."""
    chosen: dict[LoggedNode, set[int]] = field(default_factory=dict)
    offered_short: set[LoggedNode] = field(default_factory=set)
    """Nodes that may take fewer rows, because their quorum missed its deadline."""
    lost: str = ""
    """Why the group was lost; empty if it is intact."""


class LoggedNode:
    """A node, with the state of each row in flight of its level."""

    def __init__(self, node: Node) -> None:
        self.node, self.name, self.level = node, node.name, node.level
        self.takes_groups = node.operation.takes_groups
        self.quorum = node.operation.quorum.n if node.operation.quorum else 0
        """Number of rows in the node's quorum; 0 without one."""
        self.waiting: set[int] = set()
        """Rows that the node still has to process, except leased ones."""
        self.leased: set[int] = set()
        self.done: set[int] = set()
        self.dropped: set[int] = set()
        self.cancelled: set[int] = set()
        """Dropped rows that the node's quorum did not need."""
        self.held_back: set[int] = set()
        """Ids of groups too old for the node, which wait for a larger bound."""
        self.needs: list[tuple[int, list[LoggedNode]]] = []
        """Pairs (level, nodes): these nodes must be done with a row, or its ancestor on that level,
        before the row is ready."""
        self.needs_above: list[tuple[int, list[LoggedNode]]] = []
        """The pairs of `needs` for levels other than the node's own."""
        self.downstream: list[LoggedNode] = []
        self.quorums_after: list[LoggedNode] = []
        self.upstream_only: list[LoggedNode] = []
        """For a quorum: nodes whose results only this node and its downstream nodes use."""
        self.serves: list[LoggedNode] = []
        """Nodes with a quorum that list this node in `upstream_only`."""
        self.own_maker: LoggedNode | None = None
        """For a node with a quorum: the node that creates its rows, if only this node, its
        `upstream_only` nodes and its downstream nodes use them."""

    def is_ready(self, ids: set[int], rows: Mapping[int, LoggedRow]) -> bool:
        """Return whether all earlier nodes are done with these rows or their ancestors."""
        for level, before in self.needs:
            here = ids if level == self.level else {rows[id].ancestor(level).id for id in ids}
            if not all(here <= other.done for other in before):
                return False
        return True

    def misses(self, ids: set[int]) -> bool:
        return not (ids.isdisjoint(self.waiting) and ids.isdisjoint(self.leased))

    def describe_lease(self, number: int) -> str:
        return f"lease {number} of node {self.name!r}"


class LoggedGraph:
    """The nodes of one graph, with the states of their rows."""

    def __init__(self, name: str, graph: Graph) -> None:
        self.name = name
        self.graph = graph
        self.nodes = [LoggedNode(node) for node in graph.nodes]
        self.by_name = {node.name: node for node in self.nodes}
        self.level_names = graph.levels
        self.makers = {n.node.makes_level: n for n in self.nodes if n.node.makes_level is not None}
        self.on_level = [[n for n in self.nodes if n.level == level] for level in sorted(graph.levels)]
        self.updates = any(n.node.operation.updates for n in self.nodes)
        self.last_lease = 0
        for node in self.nodes:
            line = self.line(node.level)
            needs: dict[int, list[LoggedNode]] = {}
            for before in (self.by_name[name] for name in node.node.after):
                if before.node.makes_level not in line:  # else `before` is done if the row exists
                    needs.setdefault(before.level, []).append(before)
            node.needs = sorted(needs.items(), key=lambda need: need[0])
            node.needs_above = [need for need in node.needs if need[0] != node.level]
            node.downstream = [n for n in self.nodes if node.name in self._upstream(n, node)]
        for node in self.nodes:
            node.quorums_after = [
                n for n in self.nodes if n.quorum and any(node in before for _, before in n.needs)
            ]
            if node.quorum:
                self._find_upstream_only(node)

    def line(self, level: int) -> list[int]:
        """Return this level and the levels above it."""
        return [SOURCE] if level == SOURCE else [level, *self.line(self.makers[level].level)]

    def _users(self, node: LoggedNode) -> set[LoggedNode]:
        return {other for other in self.nodes if node.name in other.node.after}

    def _upstream(self, node: LoggedNode, maker: LoggedNode) -> set[str]:
        """Return the names of the nodes that `node` depends on, directly or indirectly. A direct
        dependency on `maker` does not count for a node that gets the rows that `maker` creates."""
        # Rows that `maker` created continue, even if it creates no more.
        own = maker.node.makes_level in self.line(node.level)
        names = {name for name in node.node.after if not (own and name == maker.name)}
        return names.union(*(self._upstream(self.by_name[name], maker) for name in names))

    def _find_upstream_only(self, quorum: LoggedNode) -> None:
        served = {quorum, *quorum.downstream}
        for node in reversed(self.nodes):  # a branch may also be traced after the quorum
            users = self._users(node)
            alike = (
                node.level == quorum.level and node.node.makes_level is None and not node.takes_groups
            )
            if node not in served and alike and users and users <= served:
                served.add(node)
                quorum.upstream_only.append(node)
                node.serves.append(quorum)
        maker = self.makers.get(quorum.level)
        if maker is not None and not maker.takes_groups and self._users(maker) <= served:
            quorum.own_maker = maker

    def is_complete(self, group: LoggedGroup, node: LoggedNode) -> bool:
        """Return whether a node can get no more rows of a group."""
        if node.level == SOURCE:
            return True
        maker = self.makers[node.level]
        return self.is_complete(group, maker) and not maker.misses(group.levels[maker.level])

    def is_finished(self, group: LoggedGroup) -> bool:
        return not any(node.misses(group.levels[node.level]) for node in reversed(self.nodes))

    def has_passed(self, row: LoggedRow, before: LoggedNode) -> bool:
        return (
            before.node.makes_level in self.line(row.level)
            or row.ancestor(before.level).id in before.done
        )

    def state(self, row: LoggedRow) -> str:
        nodes = self.on_level[row.level]
        if any(row.id in node.leased for node in nodes):
            return "leased"
        return (
            "dropped" if row.group.lost or any(row.id in node.dropped for node in nodes) else "waiting"
        )

    def dropped_of(self, group: LoggedGroup) -> set[int]:
        if group.lost:
            return set().union(*group.levels)
        return set().union(*(group.levels[node.level] & node.dropped for node in self.nodes))

    def forget(self, group: LoggedGroup) -> None:
        for node in self.nodes:
            ids = group.levels[node.level]
            for state in (node.done, node.dropped, node.cancelled):
                state -= ids
            node.held_back.discard(group.id)


# Rows and leases


@dataclass
class GraphCounts:
    """Row counts of a graph. `issued` = `waiting` + `leased` + `done` + `dropped`."""

    issued: int = 0
    waiting: int = 0
    leased: int = 0
    done: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped rows, keyed by first reason."""
    consumed: Counter[str] = field(default_factory=Counter)
    """Number of rows that each node has processed."""
    stale: Counter[str] = field(default_factory=Counter)
    """Number of groups that were too old at a claim, keyed by fate."""


@dataclass(slots=True)
class LoggedLease:
    node: LoggedNode
    ids: set[int]
    """Leased rows, except those requeued one by one."""
    open: set[int]
    at: int
    made: set[int] = field(default_factory=set)
    staged: list[tuple[Record, set[int]]] = field(default_factory=list)
    """Publish records and finished rows of a node that takes groups. They take effect when the
    lease is finished."""


class LoggedRows:
    """Unfinished rows and groups, and open leases."""

    def __init__(
        self,
        on_finished: Callable[[LoggedGroup, Mapping[int, LoggedRow]], None] | None,
        *,
        keep_parts: bool,
    ) -> None:
        self.in_flight: dict[int, LoggedRow] = {}
        self.groups: dict[int, LoggedGroup] = {}
        """Groups in flight by id, oldest first."""
        self.leases: dict[tuple[str, int], LoggedLease] = {}
        self.next_id = self.next_group = 0
        self.events = 0
        self._on_finished, self._keep_parts = on_finished, keep_parts
        self._counts: dict[str, GraphCounts] = {}
        """Row counts of each graph. `counts` fills in `waiting` and `leased`."""
        self._touched: set[LoggedGroup] = set()

    def add_graph(self, graph: LoggedGraph) -> None:
        self._counts[graph.name] = GraphCounts(consumed=Counter(dict.fromkeys(graph.by_name, 0)))

    def counts(self) -> dict[str, GraphCounts]:
        found = {name: replace(c, dropped=c.dropped.copy()) for name, c in self._counts.items()}
        for row in self.in_flight.values():
            graph = row.group.graph
            counts, state = found[graph.name], graph.state(row)
            counts.leased += state == "leased"
            counts.waiting += state == "waiting"
            if state == "dropped":
                counts.dropped[row.group.lost or row.reason] += 1
        return found

    def issue_row(self, graph: LoggedGraph, step: int, position: int, tokens: int) -> None:
        levels: list[set[int]] = [set() for _ in graph.on_level]
        group = LoggedGroup(self.next_group, graph, step, position, tokens, levels)
        self.groups[group.id] = group
        self._add([LoggedRow(self.next_id, group, None, SOURCE, tokens, None)])
        self.next_id += 1
        self.next_group += 1

    def _issue_again(self, group: LoggedGroup) -> None:
        self.issue_row(group.graph, group.issued_in, group.position, group.tokens)

    def _add(self, rows: list[LoggedRow]) -> None:
        first = rows[0]
        graph, nodes = first.group.graph, first.group.graph.on_level[first.level]
        new = {row.id: row for row in rows}
        self.in_flight |= new
        self._counts[graph.name].issued += len(rows)
        for node in nodes:
            node.waiting |= new.keys()
        # An ancestor may have been dropped before these rows arrived.
        above = [node for node in nodes if node.needs_above]
        for row in rows:
            group = row.group
            group.levels[row.level].add(row.id)
            for quorum in group.chosen:
                if row.id in quorum.waiting:
                    self._cancel(row, quorum, f"late at {quorum.name}")
            for node in above:
                if reason := _cut_off(row, node):
                    self.drop_from(row, node, reason)
        groups = {row.group for row in rows}
        self._touched |= groups
        self._see_arrivals(groups, nodes)

    def by_group(self, ids: Iterable[int]) -> dict[LoggedGroup, set[int]]:
        found: dict[LoggedGroup, set[int]] = {}
        for id in ids:
            found.setdefault(self.in_flight[id].group, set()).add(id)
        return found

    def accept(self, node: LoggedNode, record: Record, finished: set[int]) -> None:
        """Apply a publish record: add new rows, count tokens, and note segments."""
        if node.node.makes_level is None:
            for id, tokens in zip(record["ids"], record["tokens"], strict=True):
                if tokens and id in self.in_flight:
                    self.in_flight[id].tokens += tokens
        elif made := self._children(record, node.node.makes_level):
            self._add(made)
        if self._keep_parts and node.node.writes:
            # Not strict, because a node may write no columns.
            for id, segment in zip(record["ids"], segments_of_rows(record), strict=False):
                if row := self.in_flight.get(id):
                    row.parts = {**(row.parts or {}), node.name: segment}
        self.mark_done(node, finished)

    def _children(self, record: Record, level: int) -> list[LoggedRow]:
        made: list[LoggedRow] = []
        versions = record.get("versions")
        for k, (id, parent_id) in enumerate(zip(record["ids"], record["parents"], strict=True)):
            parent = self.in_flight.get(parent_id)
            if parent is None or id in self.in_flight:
                continue  # already reported as a violation
            version, tokens = parent.version if versions is None else versions[k], record["tokens"][k]
            child = LoggedRow(id, parent.group, parent, level, parent.tokens + tokens, version)
            parent.children.append(child)
            made.append(child)
        return made

    def mark_done(self, node: LoggedNode, ids: set[int]) -> None:
        if not ids:
            return
        node.leased -= ids
        node.done |= ids
        groups = {self.in_flight[id].group for id in ids}
        self._touched |= groups
        self._counts[next(iter(groups)).graph.name].consumed[node.name] += len(ids)
        self._see_arrivals(groups, node.quorums_after)

    def _see_arrivals(self, groups: Iterable[LoggedGroup], nodes: Iterable[LoggedNode]) -> None:
        """Note which rows of these groups this record made ready, for nodes with a quorum."""
        for quorum, group in ((n, g) for n in nodes if n.quorum for g in groups):
            arrived = group.arrived.setdefault(quorum, {})
            # All rows that a record makes ready arrive at once.
            for id in (group.levels[quorum.level] & quorum.waiting) - arrived.keys():
                if quorum.is_ready({id}, self.in_flight):
                    arrived[id] = self.events

    def requeue(self, node: LoggedNode, ids: set[int]) -> None:
        node.leased -= ids
        node.waiting |= ids
        for quorum in node.serves:
            for id in ids & quorum.cancelled:  # cancelled by the quorum while they were leased
                self._skip(self.in_flight[id], node)

    def lease(self, graph: LoggedGraph, number: int, node: LoggedNode, ids: list[int], at: int) -> None:
        taken = set(ids)
        node.waiting -= taken
        node.leased |= taken
        if (level := node.node.makes_level) is not None:
            for row in (self.in_flight[id] for id in ids):
                if not any(child.level == level for child in row.children):  # else already reserved
                    row.group.ids_aside[row.id, level] = range(self.next_id, self.next_id + MAX_CHILDREN)
                    self.next_id += MAX_CHILDREN
        self.leases[graph.name, number] = LoggedLease(node, taken, set(taken), at)

    def choose(self, group: LoggedGroup, quorum: LoggedNode, taken: set[int]) -> None:
        """Set the rows that a quorum takes from a group, and cancel the others."""
        group.chosen[quorum] = taken
        for id in sorted(group.levels[quorum.level] - taken - quorum.dropped - quorum.done):
            self._cancel(self.in_flight[id], quorum, f"over-issued at {quorum.name}")
        if quorum.own_maker is not None:
            self._cut_short(group, quorum.own_maker)

    def lose(self, group: LoggedGroup, *, again: bool) -> None:
        """Drop a group's waiting rows. `again` issues its prompt again."""
        for node in group.graph.nodes:
            waiting = group.levels[node.level] & node.waiting
            node.waiting -= waiting
            node.dropped |= waiting
        group.lost = "lost" if again else "given up"
        if again:
            self._issue_again(group)
        self._touched.add(group)

    def reject(self, group: LoggedGroup, node: LoggedNode, fate: str) -> None:
        self.count_stale(group.graph, fate, 1)
        if fate == "wait":
            node.held_back.add(group.id)
            return
        if fate == "requeue":
            self._issue_again(group)
        for id in sorted(group.levels[node.level] - node.dropped):
            self.drop_from(self.in_flight[id], node, f"stale at {node.name}")

    def count_stale(self, graph: LoggedGraph, fate: str, groups: int) -> None:
        self._counts[graph.name].stale[fate] += groups

    def _cancel(self, row: LoggedRow, quorum: LoggedNode, reason: str) -> None:
        """Drop a row that a quorum does not need, and skip work that only the quorum uses."""
        self.drop_from(row, quorum, reason)
        quorum.cancelled.add(row.id)
        for node in quorum.upstream_only:
            self._skip(row, node)

    def _cut_short(self, group: LoggedGroup, maker: LoggedNode) -> None:
        """Finish the remaining parents at `maker`: its quorum needs no more rows."""
        left = group.levels[maker.level] - maker.done - maker.dropped
        for lease in self.leases.values():
            if lease.node is maker:
                lease.open -= left
        maker.waiting -= left
        self.mark_done(maker, left)

    def drop_from(self, row: LoggedRow, node: LoggedNode, reason: str) -> None:
        """Drop a row at a node, and the row and its descendants downstream of it."""
        row.reason = row.reason or reason
        self._skip(row, node)
        self.drop_below(row, node, reason)

    def drop_below(self, row: LoggedRow, node: LoggedNode, reason: str) -> None:
        """Drop a row and its descendants downstream of a node."""
        row.reason = row.reason or reason
        for below in node.downstream:
            for other in (row,) if row.level == below.level else row.below(below.level):
                if other.id not in below.done:
                    other.reason = other.reason or reason
                    self._skip(other, below)

    def _skip(self, row: LoggedRow, node: LoggedNode) -> None:
        # Leased rows stay leased until their holder publishes or releases them.
        if row.id in node.waiting:
            node.waiting.remove(row.id)
            node.dropped.add(row.id)
            self._touched.add(row.group)

    def forget_finished_groups(self) -> None:
        """Count and forget the groups that the current event finished, and end the event."""
        for group in self._touched:
            if group.id in self.groups and group.graph.is_finished(group):
                self._forget(group)
        self._touched.clear()
        self.events += 1

    def _forget(self, group: LoggedGroup) -> None:
        counts = self._counts[group.graph.name]
        if self._on_finished is not None:
            self._on_finished(group, self.in_flight)
        dropped = group.graph.dropped_of(group)
        for id in set[int]().union(*group.levels):
            row = self.in_flight.pop(id)
            if id in dropped:
                counts.dropped[group.lost or row.reason] += 1
            else:
                counts.done += 1
        group.graph.forget(group)
        del self.groups[group.id]


def _cut_off(row: LoggedRow, node: LoggedNode) -> str:
    """Return why a new row never becomes ready for a node; empty if it may."""
    for level, before in node.needs_above:
        ancestor = row.ancestor(level)
        if any(ancestor.id in other.dropped for other in before):
            return ancestor.reason
    return ""


def segments_of_rows(record: Record) -> list[Any]:
    """Return the segment of each published row; empty if no columns were written."""
    if "segments" in record:
        return [segment for rows, *segment in record["segments"] for _ in range(rows)]
    return [record["segment"]] * len(record["ids"]) if record.get("segment") else []
