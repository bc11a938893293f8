"""Rows and groups as the ledger keeps them: ids, states, locations, and the nodes that they wait
for, but no tokens."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..graph import SOURCE, Graph, Node
from .segments import Segment

MAX_CHILDREN = 4096
"""Most children of one row. Sample ids are reserved before their number is known."""


class Ids:
    """Id counters of a run: sample ids are unique over all graphs, group ids are in order of issue.

    >>> ids = Ids()
    >>> ids.reserve(3), ids.reserve(1), ids.next_id
    (0, 3, 4)
    """

    def __init__(self, next_id: int = 0, next_group: int = 0) -> None:
        self.next_id = next_id
        self.next_group = next_group

    def reserve(self, number: int) -> int:
        """Reserve `number` consecutive sample ids and return the first."""
        first, self.next_id = self.next_id, self.next_id + number
        return first


class GroupState(enum.Enum):
    """State of a group at a node that takes groups or batches.

    GATHERING ──offer──> READY ──claim──> CLAIMED
                         │ ^ │ ^──release───┘
               too old, ─┘ │ └─all its rows are dropped──> DROPPED
               it waits    │
              TOO_OLD ─────┘ a later claim allows its age
    """

    GATHERING = "gathering"
    READY = "ready"
    """Complete, or its quorum is reached. A claim can take it."""
    TOO_OLD = "too_old"
    """Too old for the bound of all claims so far, and waiting for a larger one."""
    CLAIMED = "claimed"
    DROPPED = "dropped"
    """It was offered, but none of its rows is left."""


@dataclass(slots=True, eq=False)
class StoredPart:
    """The segment that one call of a node wrote, shared by all rows of the call."""

    segment: Segment
    written: int
    """Rows in the segment."""
    in_flight: int
    """Rows in flight that need it. With the last one, the segment is freed."""


# Masks


def places_in(mask: int) -> Sequence[int]:
    """Return the positions of the set bits, ascending.

    >>> list(places_in(0b10110)), list(places_in(0b111)), list(places_in(0))
    ([1, 2, 4], [0, 1, 2], [])
    """
    if not mask & (mask - 1):
        return (mask.bit_length() - 1,) if mask else ()
    # All low bits are set: the common case of a complete group.
    if not mask & (mask + 1):
        return range(mask.bit_length())
    places: list[int] = []
    while mask:
        lowest = mask & -mask
        places.append(lowest.bit_length() - 1)
        mask ^= lowest
    return places


def mask_of(places: Iterable[int]) -> int:
    mask = 0
    for place in places:
        mask |= 1 << place
    return mask


def union(masks: Iterable[int], mask: int = 0) -> int:
    for one in masks:
        mask |= one
    return mask


# Rows and groups

SEARCHED = 64
"""Levels with more rows than this use an index to find an id; smaller ones search the list."""


class LevelRows:
    """The rows of one level of a group, as columns.

    A row's place is its number in order of arrival; bit k of a mask is the row at place k. One
    integer operation thus updates any set of rows. At each node of its level, a row is in one
    state:

    blocked ──offer──> ready ──claim──> leased ──publish──> done
       │                │ ^───release─────┘
       └──────skip──────┴─────────────────────────────────> dropped

    Dropped rows are those that the node never sees: a filter or a quorum left them out, or they
    were too old or lost.
    """

    __slots__ = (
        *("_places", "above", "aside", "cancelled", "done", "ids", "leased", "lost"),
        *("offered", "parents", "parts", "skipped", "tokens", "versions"),
    )

    def __init__(self, above: int, num_nodes: int) -> None:
        self.above = above
        self.ids: list[int] = []
        self.parents: list[int] = []
        """Place of each row's parent; 0 for a row of the source."""
        self.tokens: list[int] = []
        self.versions: list[int | None] = []
        """Oldest policy version in each row; None if no policy made it."""
        none = [0] * num_nodes
        self.done, self.offered, self.leased, self.skipped = none, none.copy(), none.copy(), none.copy()
        """Node -> mask of the rows that are done, were offered, are leased, or are dropped
        there."""
        self.cancelled = none.copy()
        """Node with a quorum -> mask of the rows that it cancelled, a subset of `skipped`."""
        self.lost = 0
        """Mask of rows that were given up, whatever their state at each node."""
        self.parts: dict[int, list[StoredPart | None]] = {}
        """Node -> part with the columns that it wrote for each row."""
        self.aside: dict[tuple[int, int], int] | None = None
        """(place, level) -> first of the MAX_CHILDREN sample ids reserved for that row's children
        on that level."""
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def all(self) -> int:
        return (1 << len(self.ids)) - 1

    def place(self, id: int) -> int:
        if len(self.ids) <= SEARCHED:
            return self.ids.index(id)
        known = self._places
        # Index only the rows that were added since the last call.
        for place in range(len(known), len(self.ids)):
            known[self.ids[place]] = place
        return known[id]

    def append(self, id: int, parent: int, tokens: int, version: int | None) -> int:
        """Add a row and return the mask with its bit."""
        bit = 1 << len(self.ids)
        self.ids.append(id)
        self.parents.append(parent)
        self.tokens.append(tokens)
        self.versions.append(version)
        # Keep the columns as long as `ids`.
        for column in self.parts.values():
            column.append(None)
        return bit

    def put(self, part: StoredPart, i: int, mask: int) -> None:
        """Note that node i wrote columns of these rows to one part."""
        if mask == self.all:
            self.parts[i] = [part] * len(self.ids)
        else:
            column = self.column(i)
            for place in places_in(mask):
                column[place] = part

    def column(self, i: int) -> list[StoredPart | None]:
        """Return the parts that node i wrote, one per row, as a list to fill in."""
        column = self.parts.get(i)
        if column is None:
            column = self.parts[i] = [None] * len(self.ids)
        return column

    def awaiting(self, i: int) -> int:
        """Return the mask of rows that are blocked, ready or leased at node i."""
        return self.all & ~(self.done[i] | self.skipped[i])

    def ready(self, i: int) -> int:
        """Return the mask of rows that are ready for node i, which takes rows."""
        return self.offered[i] & ~(self.done[i] | self.leased[i] | self.skipped[i])

    def in_order(self, mask: int) -> Sequence[int]:
        """Return the places of some rows, in the order of their sample ids."""
        if not mask & (mask - 1):
            return (mask.bit_length() - 1,) if mask else ()
        # Children arrive in any order, so places do not follow ids.
        return sorted(places_in(mask), key=self.ids.__getitem__)

    def first_child(self, place: int, level: int) -> int:
        """Return the first sample id reserved for a row's children on a level; -1 if none is."""
        return -1 if self.aside is None else self.aside.get((place, level), -1)


class Group:
    """All rows that come from one issued row, on every level.

    Lists are indexed by level; bit i of a mask is node i.
    """

    __slots__ = (
        *("behind", "claimed", "closed", "complete", "id", "issued_in", "levels", "offered"),
        *("open", "order", "position", "rested", "tokens", "too_old", "trained_in", "version"),
    )

    def __init__(
        self, id: int, position: int, step: int, tokens: int, above: Sequence[int], num_nodes: int
    ) -> None:
        """`above` has the level of the parents of each level."""
        self.id = id
        self.position = position
        self.issued_in = step
        self.trained_in: int | None = None
        """Step of the last update that trained on it."""
        self.tokens = tokens
        self.version: int | None = None
        """Policy version of the weights when its generation began."""
        self.levels = [LevelRows(level, num_nodes) for level in above]
        self.complete = [False] * len(above)
        """Whether all rows of each level exist."""
        self.offered = self.too_old = self.claimed = self.closed = 0
        """Masks of nodes: the group was offered to them; it waits because it is too old; they
        claimed it; they chose their quorum from it."""
        self.open = 0
        """Number of (row, node) pairs that are not done or skipped."""
        self.behind = 0
        """The part of `open` at nodes that only record rows."""
        self.rested = False
        """Whether only recording is left to do."""
        self.order: dict[int, list[int]] | None = None
        """Node with a quorum -> places of its rows in order of becoming ready."""

    def state(self, i: int) -> GroupState:
        """Return its state at node i, which takes groups."""
        if self.claimed >> i & 1:
            return GroupState.CLAIMED
        if self.too_old >> i & 1:
            return GroupState.TOO_OLD
        if not self.offered >> i & 1:
            return GroupState.GATHERING
        return GroupState.READY if self.num_ready(i) else GroupState.DROPPED

    def num_ready(self, i: int) -> int:
        """Return how many rows node i, which takes groups, can claim."""
        return sum([(rows.offered[i] & ~rows.skipped[i]).bit_count() for rows in self.levels])

    @property
    def num_rows(self) -> int:
        return sum([len(rows.ids) for rows in self.levels])

    @property
    def num_leased(self) -> int:
        return sum([union(rows.leased).bit_count() for rows in self.levels])

    @property
    def num_dropped(self) -> int:
        """Number of rows that some node never sees and that are not leased."""
        return sum(
            [(union(rows.skipped, rows.lost) & ~union(rows.leased)).bit_count() for rows in self.levels]
        )


class Row(NamedTuple):
    """View of one row; its group has the data."""

    group: Group
    level: int
    place: int

    @property
    def _level(self) -> LevelRows:
        return self.group.levels[self.level]

    @property
    def id(self) -> int:
        return self._level.ids[self.place]

    @property
    def tokens(self) -> int:
        return self._level.tokens[self.place]

    @property
    def version(self) -> int | None:
        """Oldest policy version in it; None if no policy made it."""
        return self._level.versions[self.place]

    @property
    def position(self) -> int:
        return self.group.position

    @property
    def parent(self) -> Row | None:
        rows = self._level
        return None if self.level == SOURCE else Row(self.group, rows.above, rows.parents[self.place])

    def ancestor(self, level: int) -> Row:
        """Return the row of a level that this one comes from, or itself."""
        row = self
        while row.level != level:
            row = row.parent
            assert row is not None
        return row

    def made(self, level: int) -> list[Row]:
        """Return the children of this row on a level."""
        rows = self.group.levels[level]
        if rows.above != self.level:
            return []
        return [
            Row(self.group, level, place)
            for place, parent in enumerate(rows.parents)
            if parent == self.place
        ]

    @property
    def number(self) -> int:
        """Its index among its parent's children, for any worker; 0 for a row of the source."""
        if self.level == SOURCE:
            return 0
        rows = self._level
        first = self.group.levels[rows.above].first_child(rows.parents[self.place], self.level)
        return 0 if first < 0 else self.id - first

    def draw(self, makes_level: int) -> list[int]:
        """Return a path that identifies this row's children on a level within the group.

        Unlike sample ids, the path depends on neither placement nor schedule, so it can seed random
        draws. It has the level of the children, then the index and level of each row on the way to
        the source. It is empty for the first expansion of a row of the source.
        """
        path, row = [makes_level], self
        while row.parent is not None:
            path += [row.number, row.level]
            row = row.parent
        # Samples of a prompt are identified by their number alone.
        return [] if path == [1] else path


# Wiring


class Wiring:
    """Dependencies between the nodes of a graph.

    Nodes are indexes into `graph.nodes`. Lists are indexed by node or by level; bit i of a mask is
    node i.
    """

    def __init__(self, graph: Graph) -> None:
        nodes = graph.nodes
        self.graph = graph
        self.index = {n.name: i for i, n in enumerate(nodes)}
        self.level = [n.level for n in nodes]
        self.maker = {n.makes_level: i for i, n in enumerate(nodes) if n.makes_level is not None}
        """Level -> the node that makes its rows."""
        self.num_levels = max([SOURCE, *self.maker]) + 1
        self.on_level = [
            [i for i, n in enumerate(nodes) if n.level == lv] for lv in range(self.num_levels)
        ]
        self.takes_groups = [n.operation.takes_groups for n in nodes]
        self.behind = [n.operation.behind for n in nodes]
        self.quorum = [n.operation.quorum.n if n.operation.quorum else 0 for n in nodes]
        """Rows in each node's quorum; 0 without a quorum."""
        self.updates = [i for i, n in enumerate(nodes) if n.operation.updates]
        self.above = [SOURCE, *(graph.parent_level(lv) for lv in range(1, self.num_levels))]
        """Level -> the level of its parents."""
        needs = [self._needs(n) for n in nodes]
        self.needs_of_row = [[j for lv, j in needs[i] if lv == n.level] for i, n in enumerate(nodes)]
        """Node -> nodes that must be done with a row before it is ready."""
        self.needs_above = [
            [(lv, j) for lv, j in needs[i] if lv != n.level] for i, n in enumerate(nodes)
        ]
        """Node -> (level, node) of nodes that must be done with an ancestor of a row before it is
        ready."""
        self.first_on_level = [[i for i in own if not self.needs_of_row[i]] for own in self.on_level]
        """Level -> nodes that a new row may be ready for."""
        self.may_be_cut_off = [any(self.needs_above[i] for i in own) for own in self.on_level]
        """Level -> whether one of its nodes depends on ancestors of its rows."""
        self.behind_on_level = [sum(self.behind[i] for i in own) for own in self.on_level]
        self.users = [[j for j, m in enumerate(nodes) if n.name in m.after] for n in nodes]
        """Node -> nodes that come after it."""
        self.then = [
            # New rows are offered when they arrive, not when their parent is done.
            [j for j in self.users[i] if n.makes_level != nodes[j].level]
            for i, n in enumerate(nodes)
        ]
        """Node -> nodes that may become ready when it finishes a row, on the same level or deeper
        ones."""
        self.downstream = [self._downstream(n) for n in nodes]
        """Node -> nodes that only see rows that it lets through: its dependents, and theirs. Nodes
        that see the rows it makes are not included, because existing rows continue if it makes no
        more."""
        self.upstream_only = [
            self._upstream_only(i) if self.quorum[i] else [] for i in range(len(nodes))
        ]
        """Quorum -> nodes of its level whose results only the quorum and its downstream nodes
        use."""
        self.served = [
            [i for i, own in enumerate(self.upstream_only) if j in own] for j in range(len(nodes))
        ]
        """Node -> quorums that it is upstream-only of."""
        self.makes_for = [self._makes_for(i) if self.quorum[i] else None for i in range(len(nodes))]
        """Quorum -> the node that makes its rows, if only the quorum, its upstream-only nodes and
        its downstream nodes use them."""

    def ends_in_quorum(self, i: int) -> bool:
        """Return whether rows that node i finishes may go to a quorum, so that their order
        matters."""
        return any(self.quorum[j] for j in self.then[i])

    def through_above(self, group: Group, i: int, mask: int) -> int:
        """Return the rows whose ancestors are done at all nodes that node i waits for."""
        for level, j in self.needs_above[i]:
            mask &= self.below(group, level, group.levels[level].done[j], self.level[i])
        return mask

    def cut_off(self, group: Group, i: int) -> int:
        """Return the rows that never become ready for node i, because an ancestor was skipped."""
        mask = 0
        for level, j in self.needs_above[i]:
            mask |= self.below(group, level, group.levels[level].skipped[j], self.level[i])
        return mask

    def has_passed(self, row: Row, name: str) -> bool:
        node = self.graph[name]
        if self._makes_ancestor(node, row.level):
            return True
        owner = row.ancestor(node.level)
        return bool(owner.group.levels[owner.level].done[self.index[name]] >> owner.place & 1)

    def below(self, group: Group, level: int, mask: int, made: int) -> int:
        """Return the mask of the rows on level `made` that are, or descend from, these rows."""
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
                mask = mask_of(
                    [place for place, parent in enumerate(rows.parents) if mask >> parent & 1]
                )
        return mask

    def _needs(self, node: Node) -> list[tuple[int, int]]:
        before = [self.graph[name] for name in node.after]
        return sorted(
            {(n.level, self.index[n.name]) for n in before if not self._makes_ancestor(n, node.level)}
        )

    def _makes_ancestor(self, node: Node, level: int) -> bool:
        """Return whether a row of this level exists only because the node is done with an
        ancestor."""
        while level != SOURCE:
            if node.makes_level == level:
                return True
            level = self.above[level]
        return False

    def _downstream(self, node: Node) -> list[int]:
        reached = {node.name}
        for other in self.graph.nodes:  # dependencies come first
            made = self._makes_ancestor(node, other.level)
            if any(a in reached and not (a == node.name and made) for a in other.after):
                reached.add(other.name)
        return [self.index[name] for name in reached if name != node.name]

    def _upstream_only(self, i: int) -> list[int]:
        nodes, served = self.graph.nodes, {i, *self.downstream[i]}
        found: list[int] = []
        for j in reversed(range(len(nodes))):  # a branch may also come after node i
            alike = self.level[j] == self.level[i] and nodes[j].makes_level is None
            users = set(self.users[j])
            if j not in served and alike and not self.takes_groups[j] and users and users <= served:
                served.add(j)
                found.append(j)
        return found

    def _makes_for(self, i: int) -> int | None:
        j = self.maker.get(self.level[i])
        if j is None or self.takes_groups[j]:
            return None
        alone = set(self.users[j]) <= {i, *self.downstream[i], *self.upstream_only[i]}
        return j if alone else None
