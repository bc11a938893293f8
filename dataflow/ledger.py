"""Ledger: the control plane of the sample buffer. It knows of each row which columns exist, where they are, and what
each node has done with it; it never holds a token. Every event costs O(1) per row and pushes readiness.

A row is *offered* to a node when everything in the node's `after` is done with it; a node that sees whole groups is
offered a group when no more rows of it can come and all are ready. A claim is a lease: rows come back when it is
released, and only the holder of its token may publish. Consumption is exactly once per node.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from .graph import SOURCE, Graph, Node
from .operation import Shape


class LeaseError(RuntimeError):
    """A lease was used after it was released or acknowledged, or for rows that are not its own."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A piece of data that some node published: `reference` leads a consumer to it, whoever moves the data."""

    reference: Any
    num_bytes: int = 0


@dataclass(frozen=True)
class Piece:
    """Where a consumer finds some columns of its rows: by `keys` (one per row, in order) among the segments.

    `keys` are sample ids, or, when `by_position`, row numbers of the one segment that holds the source.
    """

    columns: tuple[str, ...]
    keys: np.ndarray
    segments: tuple[Segment, ...]
    by_position: bool = False


@dataclass(frozen=True)
class Published:
    """What the ledger must be told of rows that a node has finished; `ids` names them in a map or a filter."""

    ids: np.ndarray
    """[rows] int64 sample ids."""
    num_tokens: np.ndarray
    """[rows] int64 tokens that these columns add to each row."""
    versions: np.ndarray | None = None
    """[rows] int64 oldest policy version in each row, when the node generated it."""
    parents: np.ndarray | None = None
    """[rows] int64 sample ids of the rows that these were made from (EXPAND only)."""


class Ids:
    """Identities of one run: sample ids unique over all its graphs, group ids in order of issue.

    >>> ids = Ids()
    >>> ids.take(3), ids.take(1), next(ids.groups), next(ids.groups)
    (0, 3, 0, 1)
    """

    def __init__(self) -> None:
        self._next = 0
        self.groups = itertools.count()

    def take(self, number: int) -> int:
        """The first of `number` consecutive sample ids that nobody else gets."""
        first = self._next
        self._next += number
        return first


class Row:
    """State of one row. Bit i of each mask is node i of the graph."""

    __slots__ = (
        "children",
        "done",
        "group",
        "id",
        "leased",
        "level",
        "offered",
        "parent",
        "parts",
        "position",
        "skipped",
        "tokens",
        "version",
    )

    def __init__(
        self, id: int, group: Group, parent: Row | None, level: int, position: int, tokens: int, version: int | None
    ) -> None:
        self.id = id
        self.group = group
        self.parent = parent
        self.level = level
        self.position = position
        self.tokens = tokens
        self.version = version
        self.done = self.offered = self.leased = self.skipped = 0
        self.parts: dict[str, Segment] = {}
        self.children: list[Row] = []


class Group:
    """All rows that come from one issued row, on every level."""

    __slots__ = ("expanded", "id", "levels", "open", "ready", "round", "skipped", "whole")

    def __init__(self, id: int, round: int, num_levels: int) -> None:
        self.id = id
        self.round = round
        self.levels: list[list[Row]] = [[] for _ in range(num_levels)]
        self.whole = [False] * num_levels
        """No more rows of this level can come."""
        self.open = 0
        """(row, node) pairs not yet done or skipped."""
        self.ready: Counter[int] = Counter()
        """Node -> rows offered to it."""
        self.skipped: Counter[int] = Counter()
        """Node -> rows that a filter took away from it."""
        self.expanded: Counter[int] = Counter()
        """Expanding node -> rows that it has finished."""


@dataclass
class Lease:
    """Rows claimed by one node. `token` fences: whoever holds an old one is refused."""

    token: int
    node: Node
    rows: list[Row]
    open: dict[int, Row] = field(default_factory=dict)
    """Rows not yet published, by sample id."""

    @property
    def ids(self) -> np.ndarray:
        return np.fromiter((r.id for r in self.rows), np.int64, len(self.rows))

    @property
    def group_ids(self) -> np.ndarray:
        return np.fromiter((r.group.id for r in self.rows), np.int64, len(self.rows))

    @property
    def parent_ids(self) -> np.ndarray:
        return np.fromiter((r.parent.id if r.parent else r.id for r in self.rows), np.int64, len(self.rows))

    @property
    def num_tokens(self) -> np.ndarray:
        return np.fromiter((r.tokens for r in self.rows), np.int64, len(self.rows))

    @property
    def versions(self) -> np.ndarray:
        """[rows] int64 oldest policy version of each row; -1 where no policy made it."""
        return np.fromiter((-1 if r.version is None else r.version for r in self.rows), np.int64, len(self.rows))


class Ledger:
    """Rows of one graph of a run, from issue to retirement.

    >>> from weft.dataflow.graph import Graph, TableSource
    >>> ledger = Ledger(Graph("empty", TableSource("prompts", pa.table({"prompt_ids": [[1]]})), ()))
    >>> ledger.issue([0], [1], round=0)
    >>> ledger.counts()
    {'issued': 1, 'waiting': 0, 'leased': 0, 'done': 1, 'dropped': 0}
    """

    def __init__(self, graph: Graph, *, ids: Ids | None = None, source: Segment | None = None) -> None:
        self.graph = graph
        self.source = source or Segment(None)
        self._ids = ids or Ids()
        self._tokens = itertools.count(1)
        self._index = {n.name: i for i, n in enumerate(graph.nodes)}
        self._num_levels = max([SOURCE, *(n.makes_level for n in graph.nodes if n.makes_level is not None)]) + 1
        self._parent_level = {lv: graph.parent_level(lv) for lv in range(1, self._num_levels)}
        self._on_level = [[i for i, n in enumerate(graph.nodes) if n.level == lv] for lv in range(self._num_levels)]
        self._after = [self._requirements(n) for n in graph.nodes]
        # Which nodes to look at again when node i has finished a row: on the row's own level, and on deeper ones.
        self._then = [
            [j for j, m in enumerate(graph.nodes) if n.name in m.after and n.makes_level != m.level]
            for n in graph.nodes
        ]
        self._downstream = [self._closure(n.name) for n in graph.nodes]
        self._offers: list[dict[int, Row]] = [{} for _ in graph.nodes]
        self._group_offers: list[dict[int, Group]] = [{} for _ in graph.nodes]
        self._todo = [0] * len(graph.nodes)
        self._unfinished_levels = [0] * self._num_levels
        self._rows: dict[int, Row] = {}
        self._groups: dict[int, Group] = {}
        self._leases: dict[int, Lease] = {}
        self._issued = self._done = 0
        self._dropped: Counter[str] = Counter()

    def _requirements(self, node: Node) -> list[tuple[int, int]]:
        """(level, mask of nodes of that level) that must be done before a row of `node` is ready."""
        masks: Counter[int] = Counter()
        for name in node.after:
            before = self.graph[name]
            if before.makes_level != node.level and not self._makes_ancestor(before, node.level):
                masks[before.level] |= 1 << self._index[name]
        return sorted(masks.items())

    def _makes_ancestor(self, node: Node, level: int) -> bool:
        while level != SOURCE:
            if node.makes_level == level:
                return True  # the row's existence is the proof that this node is done
            level = self._parent_level[level]
        return False

    def _closure(self, name: str) -> list[int]:
        """Nodes that see only what the node `name` lets through: its dependents, and theirs."""
        reached = {name}
        for node in self.graph.nodes:  # recorded in an order in which dependencies come first
            if any(a in reached for a in node.after):
                reached.add(node.name)
        return [self._index[n] for n in reached if n != name]

    # Rows come in

    def issue(self, positions: Sequence[int], num_tokens: Sequence[int], *, round: int) -> None:
        """New rows from these rows of the source; each is the root of a group of its own."""
        first = self._ids.take(len(positions))
        for id, (position, tokens) in enumerate(zip(positions, num_tokens, strict=True), first):
            group = Group(next(self._ids.groups), round, self._num_levels)
            self._groups[group.id] = group
            for level in range(1, self._num_levels):
                self._unfinished_levels[level] += 1
            row = Row(id, group, None, SOURCE, int(position), int(tokens), None)
            group.whole[SOURCE] = True
            self._add(row)
            self._retire_if_finished(group)

    def _add(self, row: Row) -> None:
        self._rows[row.id] = row
        self._issued += 1
        row.group.levels[row.level].append(row)
        nodes = self._on_level[row.level]
        row.group.open += len(nodes)
        for i in nodes:
            self._todo[i] += 1
        for i in nodes:
            self._offer_if_ready(row, i)

    # Readiness

    def _offer_if_ready(self, row: Row, i: int) -> None:
        bit = 1 << i
        if (row.offered | row.skipped | row.done) & bit:
            return
        for level, mask in self._after[i]:
            if _ancestor(row, level).done & mask != mask:
                return
        row.offered |= bit
        if self.graph.nodes[i].operation.whole_groups or self.graph.nodes[i].operation.updates:
            row.group.ready[i] += 1
            self._offer_group_if_ready(row.group, i)
        else:
            self._offers[i][row.id] = row

    def _offer_group_if_ready(self, group: Group, i: int) -> None:
        level = self.graph.nodes[i].level
        expected = len(group.levels[level]) - group.skipped[i]
        if group.whole[level] and expected and group.ready[i] == expected:
            self._group_offers[i][group.id] = group

    def _finish_level_if_whole(self, group: Group, level: int) -> None:
        """Mark a level whole when nothing that makes its rows is left to do, then look one level further."""
        for maker in (n for n in self.graph.nodes if n.makes_level == level):
            i = self._index[maker.name]
            parents = len(group.levels[maker.level])
            if group.whole[level] or not group.whole[maker.level] or group.expanded[i] + group.skipped[i] < parents:
                return
        if group.whole[level]:
            return
        group.whole[level] = True
        self._unfinished_levels[level] -= 1
        for i in self._on_level[level]:
            self._offer_group_if_ready(group, i)
            if self.graph.nodes[i].makes_level is not None:
                self._finish_level_if_whole(group, self.graph.nodes[i].makes_level or 0)

    def ready(self, node: Node) -> int:
        """Rows that a claim on this node could get now."""
        i = self._index[node.name]
        return len(self._offers[i]) + sum(g.ready[i] for g in self._group_offers[i].values())

    def ready_groups(self, node: Node) -> int:
        """Whole groups that a claim on this node could get now (nodes that take groups or batches)."""
        return len(self._group_offers[self._index[node.name]])

    def settled(self, node: Node) -> bool:
        """Everything issued so far that will reach this node is ready for it, and none of it is leased."""
        i = self._index[node.name]
        return self._todo[i] > 0 and self._unfinished_levels[node.level] == 0 and self.ready(node) == self._todo[i]

    def exhausted(self, node: Node) -> bool:
        """Nothing issued so far is left for this node to do."""
        i = self._index[node.name]
        return self._todo[i] == 0 and self._unfinished_levels[node.level] == 0

    @property
    def group_ids(self) -> list[int]:
        """Groups in flight, oldest first."""
        return list(self._groups)

    @property
    def groups_in_flight(self) -> int:
        """Groups issued and not yet finished by every node."""
        return len(self._groups)

    # Rows are worked on

    def claim(self, node: Node, *, max_rows: int | None = None, max_groups: int | None = None) -> Lease | None:
        """Lease ready rows to this node, in order of group and sample id; None when there are none."""
        i = self._index[node.name]
        if node.operation.whole_groups or node.operation.updates:
            chosen = sorted(self._group_offers[i])[:max_groups]
            bit = 1 << i
            rows = [r for g in chosen for r in self._group_offers[i].pop(g).levels[node.level] if not r.skipped & bit]
        else:
            rows = list(self._offers[i].values())
        rows.sort(key=lambda r: (r.group.id, r.id))
        if not (node.operation.whole_groups or node.operation.updates):
            rows = rows[:max_rows]
            for row in rows:
                del self._offers[i][row.id]
        if not rows:
            return None
        for row in rows:
            row.leased |= 1 << i
        lease = Lease(next(self._tokens), node, rows, {r.id: r for r in rows})
        self._leases[lease.token] = lease
        return lease

    def pieces(self, node: Node, rows: Sequence[Row]) -> list[Piece]:
        """Where a consumer finds the columns that this node reads of these rows."""
        by_writer: dict[str, list[str]] = {}
        for column in node.reads:
            by_writer.setdefault(node.writers[column], []).append(column)
        pieces: list[Piece] = []
        for writer, columns in by_writer.items():
            if not writer:
                keys = np.fromiter((_ancestor(r, SOURCE).position for r in rows), np.int64, len(rows))
                pieces.append(Piece(tuple(columns), keys, (self.source,), by_position=True))
                continue
            level = self.graph.level_of(writer)
            owners = [_ancestor(r, level) for r in rows]
            keys = np.fromiter((r.id for r in owners), np.int64, len(rows))
            pieces.append(Piece(tuple(columns), keys, tuple(dict.fromkeys(r.parts[writer] for r in owners))))
        return pieces

    def publish(self, lease: Lease, published: Published, segment: Segment) -> None:
        """Rows of a lease that its node has finished, all or some of them, with what it wrote.

        Of an EXPAND these are the new rows, together with all others of the same parents; the parents are done.
        """
        self._check(lease)
        node = lease.node
        if node.makes_level is not None:
            self._publish_children(lease, node, published, segment)
            return
        for k, id in enumerate(published.ids.tolist()):
            row = lease.open.pop(id, None)
            if row is None:
                raise LeaseError(
                    f"node {node.name!r} published row {id}, which is not (or no longer) in lease {lease.token}"
                )
            if node.writes:
                row.parts[node.name] = segment
            row.tokens += int(published.num_tokens[k])
            self._finish(row, self._index[node.name])

    def _publish_children(self, lease: Lease, node: Node, published: Published, segment: Segment) -> None:
        assert published.parents is not None and node.makes_level is not None
        i = self._index[node.name]
        parents: dict[int, Row] = {}
        versions = published.versions
        for k, (id, parent_id) in enumerate(zip(published.ids.tolist(), published.parents.tolist(), strict=True)):
            parent = lease.open.get(parent_id)
            if parent is None:
                raise LeaseError(
                    f"node {node.name!r} made a row of {parent_id}, which is not (or no longer) in lease {lease.token}"
                )
            parents[parent_id] = parent
            version = parent.version if versions is None else int(versions[k])
            row = Row(
                id,
                parent.group,
                parent,
                node.makes_level,
                parent.position,
                parent.tokens + int(published.num_tokens[k]),
                version,
            )
            row.parts[node.name] = segment
            parent.children.append(row)
            self._add(row)
        for parent in parents.values():
            del lease.open[parent.id]
            parent.group.expanded[i] += 1
            self._finish(parent, i)

    def finish(self, lease: Lease) -> None:
        """The node is through with the lease. Rows that a FILTER did not publish are dropped; an EXPAND made nothing of
        the parents that it did not mention.

        Raises:
            LeaseError: when a map or group left rows out.
        """
        self._check(lease)
        shape = lease.node.operation.shape
        i = self._index[lease.node.name]
        if lease.open and shape in (Shape.MAP, Shape.GROUP):
            some = list(lease.open)[:3]
            raise LeaseError(
                f"node {lease.node.name!r} returned no row for {len(lease.open)} of its rows (sample ids {some})"
            )
        for row in lease.open.values():
            if shape is Shape.FILTER:
                self._drop(row, i)
            else:
                row.group.expanded[i] += 1
            self._finish(row, i)
        lease.open.clear()
        del self._leases[lease.token]

    def release(self, lease: Lease) -> None:
        """Give the unpublished rows of a lease back: they are ready again, and the lease is void."""
        self._check(lease)
        i = self._index[lease.node.name]
        bit = 1 << i
        for row in lease.open.values():
            row.leased &= ~bit
            if lease.node.operation.whole_groups or lease.node.operation.updates:
                self._group_offers[i][row.group.id] = row.group
            else:
                self._offers[i][row.id] = row
        del self._leases[lease.token]

    def _check(self, lease: Lease) -> None:
        if self._leases.get(lease.token) is not lease:
            raise LeaseError(f"lease {lease.token} of node {lease.node.name!r} was released or finished before")

    def _finish(self, row: Row, i: int) -> None:
        bit = 1 << i
        row.done |= bit
        row.leased &= ~bit
        self._todo[i] -= 1
        group = row.group
        group.open -= 1
        for j in self._then[i]:
            level = self.graph.nodes[j].level
            for descendant in _descendants(row, level, self._parent_level):
                self._offer_if_ready(descendant, j)
        made = self.graph.nodes[i].makes_level
        if made is not None:
            self._finish_level_if_whole(group, made)
        self._retire_if_finished(group)

    def _drop(self, row: Row, i: int) -> None:
        """Take a row away from everything downstream of filter i."""
        self._dropped[self.graph.nodes[i].name] += 1
        for j in self._downstream[i]:
            node = self.graph.nodes[j]
            for lost in _descendants(row, node.level, self._parent_level):
                bit = 1 << j
                if (lost.skipped | lost.done) & bit:
                    continue
                lost.skipped |= bit
                self._todo[j] -= 1
                lost.group.open -= 1
                lost.group.skipped[j] += 1
                self._offer_group_if_ready(lost.group, j)
            if node.makes_level is not None:
                self._finish_level_if_whole(row.group, node.makes_level)

    def _retire_if_finished(self, group: Group) -> None:
        if group.open or not all(group.whole):
            return
        for level in group.levels:
            for row in level:
                self._done += not row.skipped
                del self._rows[row.id]
        del self._groups[group.id]

    # Inspection

    def counts(self) -> dict[str, int]:
        """The conservation law: every row ever issued is exactly one of waiting, leased, done, or dropped."""
        leased = sum(1 for r in self._rows.values() if r.leased)
        dropped_live = sum(1 for r in self._rows.values() if r.skipped and not r.leased)
        waiting = len(self._rows) - leased - dropped_live
        retired = self._issued - len(self._rows)
        return {
            "issued": self._issued,
            "waiting": waiting,
            "leased": leased,
            "done": self._done,
            "dropped": retired - self._done + dropped_live,
        }

    @property
    def dropped(self) -> dict[str, int]:
        """Rows dropped so far, by the filter that dropped them."""
        return dict(self._dropped)

    def table(self) -> pa.Table:
        """Every row in flight, as `sample_id, group_id, parent_id, level, round, tokens, version, done, leased` (node names)."""
        names = [n.name for n in self.graph.nodes]

        def of(mask: int) -> list[str]:
            return [name for i, name in enumerate(names) if mask >> i & 1]

        levels = self.graph.levels
        return pa.Table.from_pylist(
            [
                {
                    "sample_id": r.id,
                    "group_id": r.group.id,
                    "parent_id": r.parent.id if r.parent else r.id,
                    "level": levels[r.level],
                    "round": r.group.round,
                    "tokens": r.tokens,
                    "version": r.version,
                    "done": of(r.done),
                    "leased": of(r.leased),
                    "dropped": of(r.skipped),
                }
                for r in self._rows.values()
            ],
            schema=pa.schema(
                [
                    ("sample_id", pa.int64()),
                    ("group_id", pa.int64()),
                    ("parent_id", pa.int64()),
                    ("level", pa.string()),
                    ("round", pa.int64()),
                    ("tokens", pa.int64()),
                    ("version", pa.int64()),
                    ("done", pa.list_(pa.string())),
                    ("leased", pa.list_(pa.string())),
                    ("dropped", pa.list_(pa.string())),
                ]
            ),
        )

    def why(self, group_id: int) -> str:
        """What a group waits for, a line per node that has not finished with it."""
        group = self._groups.get(group_id)
        if group is None:
            return f"group {group_id} is not in flight: it is finished, or it was never issued"
        lines: list[str] = []
        for i, node in enumerate(self.graph.nodes):
            rows = group.levels[node.level]
            bit = 1 << i
            left = [r for r in rows if not (r.done | r.skipped) & bit]
            if not left and group.whole[node.level]:
                continue
            leased = sum(1 for r in left if r.leased & bit)
            missing = sorted({a for r in left for a in node.after if not self._passed(r, a)})
            if not group.whole[node.level]:
                maker = self.graph.levels[node.level]
                missing.append(f"the rest of the group from {maker!r}")
            state = (
                f"{leased} leased" if leased else f"waits for {', '.join(missing)}" if missing else "ready, not claimed"
            )
            lines.append(f"{node.name}: {len(left)} of {len(rows)} rows to do; {state}")
        return "\n".join(lines)

    def _passed(self, row: Row, name: str) -> bool:
        node = self.graph[name]
        if self._makes_ancestor(node, row.level):
            return True
        return bool(_ancestor(row, node.level).done >> self._index[name] & 1)


def _ancestor(row: Row, level: int) -> Row:
    while row.level != level:
        assert row.parent is not None
        row = row.parent
    return row


def _descendants(row: Row, level: int, parent_level: dict[int, int]) -> Iterable[Row]:
    """The rows of a level that come from this row: itself, or (grand)children."""
    if row.level == level:
        return (row,)
    path = [level]
    while path[-1] != SOURCE and path[-1] != row.level:
        path.append(parent_level[path[-1]])
    if path[-1] != row.level:
        return ()
    rows = [row]
    for step in reversed(path[:-1]):
        rows = [c for r in rows for c in r.children if c.level == step]
    return rows
