"""Ledger: the control plane of the sample buffer. It knows of each row which columns exist, where they are, and what
each node has done with it; it never holds a token. Every event costs O(1) per row and pushes readiness.

A row is *offered* to a node when everything in the node's `after` is done with it; a node that sees whole groups is
offered a group when no more rows of it can come and all are ready. A claim is a lease: rows come back when it is
released, and only the holder of its token may publish. Consumption is exactly once per node.

What a node that takes groups publishes counts when its lease is finished: a lease that is released in between gives whole
groups back.
"""

from __future__ import annotations

import heapq
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

    __slots__ = ("expanded", "id", "levels", "offered", "open", "ready", "round", "skipped", "whole")

    def __init__(self, id: int, round: int, num_levels: int) -> None:
        self.id = id
        self.round = round
        self.levels: list[list[Row]] = [[] for _ in range(num_levels)]
        self.whole = [False] * num_levels
        """No more rows of this level can come."""
        self.offered = 0
        """Mask of the nodes that it was offered to."""
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
    staged: list[tuple[dict[int, Row], Published, Segment]] = field(default_factory=list)
    """What was published of it and does not count yet (nodes that take groups): rows (parents of an EXPAND) and data."""

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
        self._maker = {n.makes_level: i for i, n in enumerate(graph.nodes) if n.makes_level is not None}
        # What may be claimed by each node: heaps of (group, sample) ids, or of group ids where the node takes groups.
        self._offers: list[list[tuple[int, int]]] = [[] for _ in graph.nodes]
        self._group_offers: list[list[int]] = [[] for _ in graph.nodes]
        self._ready = [0] * len(graph.nodes)
        self._todo = [0] * len(graph.nodes)
        self._round = -1
        self._claimed = [0] * len(graph.nodes)
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
        if round != self._round:
            self._round = round
            self._claimed = [0] * len(self.graph.nodes)
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
        if self.graph.nodes[i].operation.takes_groups:
            row.group.ready[i] += 1
            self._offer_group_if_ready(row.group, i)
        else:
            heapq.heappush(self._offers[i], (row.group.id, row.id))
            self._ready[i] += 1

    def _offer_group_if_ready(self, group: Group, i: int) -> None:
        node = self.graph.nodes[i]
        expected = len(group.levels[node.level]) - group.skipped[i]
        offered = group.offered >> i & 1
        if node.operation.takes_groups and group.whole[node.level] and group.ready[i] == expected > 0 and not offered:
            group.offered |= 1 << i
            heapq.heappush(self._group_offers[i], group.id)
            self._ready[i] += expected

    def _finish_level_if_whole(self, group: Group, level: int) -> None:
        """Mark a level whole when nothing that makes its rows is left to do, then look one level further."""
        i = self._maker[level]
        above = self.graph.nodes[i].level
        finished = group.expanded[i] + group.skipped[i]
        if group.whole[level] or not group.whole[above] or finished < len(group.levels[above]):
            return
        group.whole[level] = True
        self._unfinished_levels[level] -= 1
        for j in self._on_level[level]:
            self._offer_group_if_ready(group, j)
            makes = self.graph.nodes[j].makes_level
            if makes is not None:
                self._finish_level_if_whole(group, makes)

    def ready(self, node: Node) -> int:
        """Rows that a claim on this node could get now."""
        return self._ready[self._index[node.name]]

    def ready_groups(self, node: Node) -> int:
        """Whole groups that a claim on this node could get now (nodes that take groups or batches)."""
        return len(self._group_offers[self._index[node.name]])

    @property
    def round(self) -> int:
        """The latest round of which rows were issued; -1 before."""
        return self._round

    def claimed_groups(self, node: Node) -> int:
        """Groups of the latest round that this node has claimed (nodes that take groups or batches)."""
        return self._claimed[self._index[node.name]]

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
        if node.operation.takes_groups:
            groups = [self._groups[g] for g in _smallest(self._group_offers[i], max_groups)]
            self._claimed[i] += sum(g.round == self._round for g in groups)
            rows = [r for g in groups for r in sorted(g.levels[node.level], key=_id) if not r.skipped >> i & 1]
        else:
            rows = [self._rows[id] for _, id in _smallest(self._offers[i], max_rows)]
        self._ready[i] -= len(rows)
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

        Raises:
            LeaseError: for rows (or parents) that are not in the lease, or were published before; nothing is changed then.
        """
        self._check(lease)
        node = lease.node
        ids = published.ids.tolist()
        held = ids if published.parents is None else published.parents.tolist()
        wrong = next((id for id in held if id not in lease.open), None)
        if wrong is not None:
            what = "published row" if published.parents is None else "made a row of"
            raise LeaseError(f"node {node.name!r} {what} {wrong}, which is not (or no longer) in lease {lease.token}")
        if len(set(ids)) != len(ids) or (published.parents is not None and any(id in self._rows for id in ids)):
            raise LeaseError(f"node {node.name!r} published a row twice in lease {lease.token}")
        rows = {id: lease.open.pop(id) for id in dict.fromkeys(held)}
        if node.operation.takes_groups:
            lease.staged.append((rows, published, segment))
        else:
            self._accept(node, rows, published, segment)

    def _accept(self, node: Node, rows: dict[int, Row], published: Published, segment: Segment) -> None:
        i = self._index[node.name]
        if published.parents is not None:
            self._accept_children(node, rows, published, segment)
            for parent in rows.values():
                parent.group.expanded[i] += 1
                self._finish(parent, i)
            return
        for row, tokens in zip(rows.values(), published.num_tokens.tolist(), strict=True):
            if node.writes:
                row.parts[node.name] = segment
            row.tokens += tokens
            self._finish(row, i)

    def _accept_children(self, node: Node, parents: dict[int, Row], published: Published, segment: Segment) -> None:
        assert published.parents is not None and node.makes_level is not None
        versions = published.versions
        for k, (id, parent_id) in enumerate(zip(published.ids.tolist(), published.parents.tolist(), strict=True)):
            parent = parents[parent_id]
            tokens = parent.tokens + int(published.num_tokens[k])
            version = parent.version if versions is None else int(versions[k])
            row = Row(id, parent.group, parent, node.makes_level, parent.position, tokens, version)
            row.parts[node.name] = segment
            parent.children.append(row)
            self._add(row)

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
        for staged in lease.staged:
            self._accept(lease.node, *staged)
        for row in lease.open.values():
            if shape is Shape.FILTER:
                self._drop(row, i)
            else:
                row.group.expanded[i] += 1
            self._finish(row, i)
        lease.open.clear()
        del self._leases[lease.token]

    def release(self, lease: Lease) -> None:
        """Give the rows of a lease back that were not published (of a node that takes groups: all of them): they are ready
        again, and the lease is void."""
        self._check(lease)
        i = self._index[lease.node.name]
        if lease.node.operation.takes_groups:
            back = lease.rows
            groups = {r.group.id: r.group for r in back}
            for group in groups.values():
                heapq.heappush(self._group_offers[i], group.id)
                self._claimed[i] -= group.round == self._round
        else:
            back = list(lease.open.values())
            for row in back:
                heapq.heappush(self._offers[i], (row.group.id, row.id))
        for row in back:
            row.leased &= ~(1 << i)
        self._ready[i] += len(back)
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


def _id(row: Row) -> int:
    return row.id


def _smallest(heap: list[Any], number: int | None) -> list[Any]:
    """Take the smallest entries (or all of them) off a heap, in order."""
    if number is None or number >= len(heap):
        taken = sorted(heap)
        heap.clear()
        return taken
    return [heapq.heappop(heap) for _ in range(number)]


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
