"""The ledger's rows and groups: ids, states at each node, and where columns are stored."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..graph import SOURCE, Graph, Node
from .segments import Segment

MAX_CHILDREN = 4096
"""Maximum number of children of a row on one level. The ledger reserves this many sample ids."""


class Ids:
    """Id counters of a run. Sample ids are unique across graphs; group ids follow the issue order.

    >>> ids = Ids()
    >>> ids.reserve(3), ids.reserve(1), ids.next_id
    (0, 3, 4)
    """

    def __init__(self, next_id: int = 0, next_group: int = 0) -> None:
        self.next_id = next_id
        self.next_group = next_group

    def reserve(self, number: int) -> int:
        """Reserve `number` consecutive sample ids, and return the first one."""
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
    """The group is complete, or its quorum is reached. A claim can take it."""
    TOO_OLD = "too_old"
    """The group is too old for all claims so far, and waits for a larger bound."""
    CLAIMED = "claimed"
    DROPPED = "dropped"
    """The group was offered, but all its rows have been dropped."""


@dataclass(slots=True, eq=False)
class StoredPart:
    """A segment that one call of a node wrote, shared by all rows of the call."""

    segment: Segment
    written: int
    """Number of rows in the segment."""
    in_flight: int
    """Number of rows in flight that need the segment. At 0, the buffer frees it."""


# Masks


def places_in(mask: int) -> Sequence[int]:
    """Return the positions of the set bits of a mask, in ascending order.

    >>> list(places_in(0b10110)), list(places_in(0b111)), list(places_in(0))
    ([1, 2, 4], [0, 1, 2], [])
    """
    if not mask & (mask - 1):
        return (mask.bit_length() - 1,) if mask else ()
    # Common case, a complete group: all low bits are set.
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
"""Levels with more rows than this look up ids in an index. Smaller ones search the list."""


class LevelRows:
    """The rows of one level of a group, as columns.

    A row's place is its index in order of arrival. Bit k of a mask stands for the row at place k,
    so one integer operation updates any set of rows. At each node of its level, a row is in one of
    these states:

    blocked ──offer──> ready ──claim──> leased ──publish──> done
       │                │ ^───release─────┘
       └──────skip──────┴─────────────────────────────────> dropped

    A node never gets dropped rows: a filter or quorum removed them, or they were too old or lost.
    """

    __slots__ = (
        *("_places", "above", "aside", "cancelled", "done", "ids", "leased", "lost"),
        *("offered", "parents", "parts", "skipped", "tokens", "versions"),
    )

    def __init__(self, above: int, num_nodes: int) -> None:
        self.above = above
        self.ids: list[int] = []
        self.parents: list[int] = []
        """Place of each row's parent on the level above; 0 for a row of the source."""
        self.tokens: list[int] = []
        self.versions: list[int | None] = []
        """Policy version of each row (`row_versions`); None if no policy generated the row."""
        none = [0] * num_nodes
        self.done, self.offered, self.leased, self.skipped = none, none.copy(), none.copy(), none.copy()
        """Masks of the rows done, offered, leased and dropped at each node, indexed by node."""
        self.cancelled = none.copy()
        """Masks of the rows that each node's quorum cancelled, a subset of `skipped`."""
        self.lost = 0
        """Mask of rows that were given up, in any state."""
        self.parts: dict[int, list[StoredPart | None]] = {}
        """Maps each node to the stored part of each row, with the columns that the node wrote."""
        self.aside: dict[tuple[int, int], int] | None = None
        """First sample id reserved for a row's children on a level, keyed by (place, level)."""
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
        # Add only rows that arrived since the last call.
        for place in range(len(known), len(self.ids)):
            known[self.ids[place]] = place
        return known[id]

    def append(self, id: int, parent: int, tokens: int, version: int | None) -> int:
        """Add a row, and return a mask with only its bit."""
        bit = 1 << len(self.ids)
        self.ids.append(id)
        self.parents.append(parent)
        self.tokens.append(tokens)
        self.versions.append(version)
        # Keep the columns at the same length as `ids`.
        for column in self.parts.values():
            column.append(None)
        return bit

    def put(self, part: StoredPart, i: int, mask: int) -> None:
        """Record that node i wrote the columns of these rows to `part`."""
        if mask == self.all:
            self.parts[i] = [part] * len(self.ids)
        else:
            column = self.column(i)
            for place in places_in(mask):
                column[place] = part

    def column(self, i: int) -> list[StoredPart | None]:
        """Return the list of parts that node i wrote, one per row. The caller may change it."""
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
        """Return the places in a mask, in order of sample id."""
        if not mask & (mask - 1):
            return (mask.bit_length() - 1,) if mask else ()
        # Children arrive in any order of id.
        return sorted(places_in(mask), key=self.ids.__getitem__)

    def first_child(self, place: int, level: int) -> int:
        """Return the first sample id reserved for a row's children on a level, or -1."""
        return -1 if self.aside is None else self.aside.get((place, level), -1)


class Group:
    """All rows that descend from one issued row. Lists are indexed by level. Bit i of a mask stands
    for node i."""

    __slots__ = (
        *("behind", "claimed", "closed", "complete", "id", "issued_in", "levels", "offered"),
        *("open", "order", "position", "rested", "tokens", "too_old", "trained_in", "version"),
    )

    def __init__(
        self, id: int, position: int, step: int, tokens: int, above: Sequence[int], num_nodes: int
    ) -> None:
        """
        Args:
            above: level of the parents of each level.
        """
        self.id = id
        self.position = position
        self.issued_in = step
        self.trained_in: int | None = None
        """Step of the last update that trained on the group."""
        self.tokens = tokens
        self.version: int | None = None
        """Policy version that sets the age of the group: the version of the claim that began its
        generation, if the claim has one, or of an older row. None without either."""
        self.levels = [LevelRows(level, num_nodes) for level in above]
        self.complete = [False] * len(above)
        """Whether all rows of each level exist."""
        self.offered = self.too_old = self.claimed = self.closed = 0
        """Masks of nodes to which the group was offered, for which it is too old, that claimed it,
        and that chose their quorum from it."""
        self.open = 0
        """Number of (row, node) pairs that are neither done nor skipped."""
        self.behind = 0
        """Number of pairs in `open` at recorders."""
        self.rested = False
        """Whether only recording is left to do."""
        self.order: dict[int, list[int]] | None = None
        """For each node with a quorum: places of rows, in the order in which they became ready."""

    def state(self, i: int) -> GroupState:
        """Return the group's state at node i, which takes groups."""
        if self.claimed >> i & 1:
            return GroupState.CLAIMED
        if self.too_old >> i & 1:
            return GroupState.TOO_OLD
        if not self.offered >> i & 1:
            return GroupState.GATHERING
        return GroupState.READY if self.num_ready(i) else GroupState.DROPPED

    def num_ready(self, i: int) -> int:
        """Return how many rows node i, which takes groups, can claim from the group."""
        return sum([(rows.offered[i] & ~rows.skipped[i]).bit_count() for rows in self.levels])

    @property
    def num_rows(self) -> int:
        return sum([len(rows.ids) for rows in self.levels])

    @property
    def num_leased(self) -> int:
        return sum([union(rows.leased).bit_count() for rows in self.levels])

    @property
    def num_dropped(self) -> int:
        """Number of rows that a node has dropped and no node leases."""
        return sum(
            [(union(rows.skipped, rows.lost) & ~union(rows.leased)).bit_count() for rows in self.levels]
        )


class Row(NamedTuple):
    """View of one row of a group."""

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
        """Policy version of the row; None if no policy generated it."""
        return self._level.versions[self.place]

    @property
    def position(self) -> int:
        return self.group.position

    @property
    def parent(self) -> Row | None:
        rows = self._level
        return None if self.level == SOURCE else Row(self.group, rows.above, rows.parents[self.place])

    def ancestor(self, level: int) -> Row:
        """Return the ancestor of this row on a level, or the row itself if that is its level."""
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
        """Index of the row among its parent's children, on any worker; 0 for source rows."""
        if self.level == SOURCE:
            return 0
        rows = self._level
        first = self.group.levels[rows.above].first_child(rows.parents[self.place], self.level)
        return 0 if first < 0 else self.id - first

    def draw(self, makes_level: int) -> list[int]:
        """Return a path that identifies this row's children on a level within the group. Placement
        and schedule do not affect the path, unlike sample ids, so it can seed random draws. The
        path is the level of the children, then the index and level of each row on the way up to the
        source. It is empty for the first expansion of a source row."""
        path, row = [makes_level], self
        while row.parent is not None:
            path += [row.number, row.level]
            row = row.parent
        # The number of a prompt's sample already identifies it.
        return [] if path == [1] else path


# Wiring


class Wiring:
    """Dependencies between the nodes of a graph. Nodes are indices into `graph.nodes`. Lists are
    indexed by node or by level. Bit i of a mask stands for node i."""

    def __init__(self, graph: Graph) -> None:
        nodes = graph.nodes
        self.graph = graph
        self.index = {n.name: i for i, n in enumerate(nodes)}
        self.level = [n.level for n in nodes]
        self.maker = {n.makes_level: i for i, n in enumerate(nodes) if n.makes_level is not None}
        """Maps each level to the node that creates its rows."""
        self.num_levels = max([SOURCE, *self.maker]) + 1
        self.on_level = [
            [i for i, n in enumerate(nodes) if n.level == lv] for lv in range(self.num_levels)
        ]
        self.takes_groups = [n.operation.takes_groups for n in nodes]
        self.behind = [n.operation.behind for n in nodes]
        self.quorum = [n.operation.quorum.n if n.operation.quorum else 0 for n in nodes]
        """Number of rows in each node's quorum; 0 without a quorum."""
        self.updates = [i for i, n in enumerate(nodes) if n.operation.updates]
        self.above = [SOURCE, *(graph.parent_level(lv) for lv in range(1, self.num_levels))]
        """Level of the parents of each level's rows."""
        needs = [self._needs(n) for n in nodes]
        self.needs_of_row = [[j for lv, j in needs[i] if lv == n.level] for i, n in enumerate(nodes)]
        """For each node: nodes that must be done with a row before it is ready."""
        self.needs_above = [
            [(lv, j) for lv, j in needs[i] if lv != n.level] for i, n in enumerate(nodes)
        ]
        """For each node: pairs (level, node). The pair's node must be done with a row's ancestor on
        that level before the row is ready."""
        self.first_on_level = [[i for i in own if not self.needs_of_row[i]] for own in self.on_level]
        """For each level: nodes that take a row without waiting for another node of the level."""
        self.may_be_cut_off = [any(self.needs_above[i] for i in own) for own in self.on_level]
        """For each level: whether any of its nodes waits for ancestors of the rows."""
        self.behind_on_level = [sum(self.behind[i] for i in own) for own in self.on_level]
        self.users = [[j for j, m in enumerate(nodes) if n.name in m.after] for n in nodes]
        """For each node: nodes with this node in their `after`."""
        self.then = [
            # New rows are offered when they arrive, not when their parent is done.
            [j for j in self.users[i] if n.makes_level != nodes[j].level]
            for i, n in enumerate(nodes)
        ]
        """For each node: nodes, on its level or below, for which it may make rows ready."""
        self.downstream = [self._downstream(n) for n in nodes]
        """For each node: its direct and indirect dependents that only receive rows that it passes
        on. Excludes nodes that get the rows it creates, which continue even if it creates no
        more."""
        self.upstream_only = [
            self._upstream_only(i) if self.quorum[i] else [] for i in range(len(nodes))
        ]
        """For each node with a quorum: nodes of its level whose results only this node and its
        downstream nodes use."""
        self.served = [
            [i for i, own in enumerate(self.upstream_only) if j in own] for j in range(len(nodes))
        ]
        """For each node: nodes with a quorum that list it in `upstream_only`."""
        self.makes_for = [self._makes_for(i) if self.quorum[i] else None for i in range(len(nodes))]
        """For each node q with a quorum: the node that creates q's rows. None if that node takes
        groups, or if nodes other than q, q's `upstream_only` nodes and q's downstream nodes use the
        rows."""

    def ends_in_quorum(self, i: int) -> bool:
        """Return whether a quorum follows node i, so that it matters in which order rows finish."""
        return any(self.quorum[j] for j in self.then[i])

    def through_above(self, group: Group, i: int, mask: int) -> int:
        """Return the rows in `mask` whose ancestors are done at all nodes that node i waits for."""
        for level, j in self.needs_above[i]:
            mask &= self.below(group, level, group.levels[level].done[j], self.level[i])
        return mask

    def cut_off(self, group: Group, i: int) -> int:
        """Return the mask of rows that node i never gets, because an ancestor was skipped."""
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
        """Return the mask of the rows on level `made` that are, or descend from, rows in `mask` on
        `level`."""
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
        """Return whether the node creates the rows of a level or their ancestors."""
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
        for j in reversed(range(len(nodes))):  # a branch may also be traced after node i
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
