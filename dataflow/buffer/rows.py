"""Rows: what the ledger keeps of each row and group. No token is among it."""

from __future__ import annotations

import enum

from .segments import Segment

MAX_CHILDREN = 4096
"""Most rows that one row may be expanded into: sample ids are set aside before it is known."""


class Ids:
    """Identities of one run: sample ids unique over all its graphs, group ids in order of issue.

    >>> ids = Ids()
    >>> ids.take(3), ids.take(1), ids.take_group(), ids.take_group()
    (0, 3, 0, 1)
    """

    def __init__(self, next_id: int = 0, next_group: int = 0) -> None:
        self.next_id = next_id
        self.next_group = next_group

    def take(self, number: int) -> int:
        """The first of `number` consecutive sample ids that nobody else gets."""
        first, self.next_id = self.next_id, self.next_id + number
        return first

    def take_group(self) -> int:
        group, self.next_group = self.next_group, self.next_group + 1
        return group


class RowState(enum.Enum):
    """What a node has to do with a row of its level.

    BLOCKED ──offer──> READY ──claim──> LEASED ──publish──> DONE
       │                │ ^───release─────┘
       └─────skip───────┴──────────────────────────────────> DROPPED
    """

    BLOCKED = "blocked"
    """It waits for other nodes, or for the rest of its group."""
    READY = "ready"
    """All that the node waits for is done with the row; a node that takes groups also waits for the others of the group."""
    LEASED = "leased"
    DONE = "done"
    DROPPED = "dropped"
    """The node never sees it: a filter left it out, a quorum did without it, it was too old, or it was lost."""


class GroupState(enum.Enum):
    """Where a group stands at a node that takes groups or batches.

    GATHERING ──offer──> READY ──claim──> CLAIMED
                         │ ^ │ ^──release───┘
               too old, ─┘ │ └─all its rows are dropped──> DROPPED
               it waits    │
                 HELD ─────┘ a later claim allows its age
    """

    GATHERING = "gathering"
    """More of its rows may become ready."""
    READY = "ready"
    """Complete, or its quorum is reached, and a claim gets it."""
    HELD = "held"
    """Too old for the bound of the claims so far, and waiting for a larger one."""
    CLAIMED = "claimed"
    """Leased, or done."""
    DROPPED = "dropped"
    """It was offered, and none of its rows is left."""


class Part:
    """What one call of a node wrote, as the ledger keeps it: the segment, how many rows it has, and how many of them are in flight.
    All rows of the call share it; when the last of them is finished, the segment is freed."""

    __slots__ = ("row_bytes", "rows", "segment", "written")

    def __init__(self, segment: Segment, written: int, rows: int) -> None:
        self.segment = segment
        self.written = written
        self.row_bytes = segment.num_bytes / written if written else 0.0
        self.rows = rows


NO_PARTS: list[Part | None] = []
"""Of all rows of which nothing is written. It stays empty."""


class Row:
    """State of one row. Bit i of each mask is node i of the graph."""

    __slots__ = (
        "cancelled",
        "children",
        "done",
        "first_children",
        "group",
        "id",
        "leased",
        "level",
        "made_under",
        "offered",
        "parent",
        "parts",
        "skipped",
        "tokens",
        "version",
    )

    def __init__(self, id: int, group: Group, parent: Row | None, level: int, tokens: int, version: int | None) -> None:
        self.id = id
        self.group = group
        self.parent = parent
        self.level = level
        self.tokens = tokens
        self.version = version
        """Oldest policy version in it; None where no policy made it."""
        self.done = self.offered = self.leased = self.skipped = self.cancelled = 0
        """`cancelled` are the nodes that have their quorum without it; it is among the skipped there."""
        self.parts: list[Part | None] = NO_PARTS
        """[nodes] where the columns lie that each node wrote of this row; empty: none has written any (see `put`)."""
        self.children: list[Row] | None = None
        self.first_children: dict[int, int] | None = None
        """Level -> where the MAX_CHILDREN sample ids begin that are set aside for the rows of this level made of this row."""

        self.made_under: dict[int, int] | None = None
        """Level -> token of the latest lease under which rows of this level are made of it."""

    @property
    def position(self) -> int:
        """Row of the source that it comes from."""
        return self.group.position

    def state(self, i: int) -> RowState:
        """Its state at node i, which is of its level."""
        if self.done >> i & 1:
            return RowState.DONE
        if self.leased >> i & 1:
            return RowState.LEASED
        if self.skipped >> i & 1:
            return RowState.DROPPED
        return RowState.READY if self.offered >> i & 1 else RowState.BLOCKED

    def put(self, part: Part, i: int, num_nodes: int) -> None:
        """Node i, of so many, has written columns of it."""
        if not self.parts:
            parts: list[Part | None] = [None] * num_nodes
            self.parts = parts
        self.parts[i] = part

    def awaits(self, i: int) -> bool:
        """Whether node i has still to finish it: it is blocked, ready or leased there."""
        return not (self.done | self.skipped) >> i & 1

    def ancestor(self, level: int) -> Row:
        """The row of a level that this one comes from, or itself."""
        row = self
        while row.level != level:
            assert row.parent is not None
            row = row.parent
        return row

    def made(self, level: int) -> list[Row]:
        """The rows of a level that were made of this row so far."""
        return [child for child in self.children or () if child.level == level]

    @property
    def number(self) -> int:
        """Its number among the rows made of its parent: the same whoever makes it, and when; 0 for a row of the source."""
        if self.parent is None or self.parent.first_children is None:
            return 0
        return self.id - self.parent.first_children[self.level]

    def draw(self, makes_level: int) -> list[int]:
        """What tells the rows of a level that are made of this row from all others of its group, on any placement and under any
        schedule (sample ids depend on both): the level, then of each row on the way to the source its number among its
        siblings, and its level. Empty for the first expansion of a row of the source.
        """
        path, row = [makes_level], self
        while row.parent is not None:
            path += [row.number, row.level]
            row = row.parent
        return [] if path == [1] else path


class Group:
    """All rows that come from one issued row, on every level. Lists are indexed by level or by node."""

    __slots__ = (
        "behind",
        "claimed",
        "closed",
        "complete",
        "expanded",
        "held",
        "id",
        "issued_in",
        "levels",
        "offered",
        "open",
        "order",
        "position",
        "ready",
        "rested",
        "skipped",
        "tokens",
        "trained_in",
        "version",
    )

    def __init__(self, id: int, position: int, step: int, tokens: int, num_levels: int, num_nodes: int) -> None:
        self.id = id
        self.position = position
        """Row of the source that was issued."""
        self.issued_in = step
        """The step in which it was issued."""
        self.trained_in: int | None = None
        """The step whose update trained it, the last one if several did."""
        self.tokens = tokens
        """Tokens of the issued row when it was issued."""
        self.version: int | None = None
        """Policy version of the weights when its generation began."""
        self.levels: list[list[Row]] = [[] for _ in range(num_levels)]
        self.complete = [False] * num_levels
        """No more rows of this level can come."""
        self.offered = self.held = self.claimed = self.closed = 0
        """Masks of the nodes that it was offered to, for which it is too old and waits, that have claimed it, and that have chosen
        their quorum of it."""
        self.open = 0
        """(row, node) pairs not yet done or skipped."""
        self.behind = 0
        """The pairs among them whose node follows behind."""
        self.rested = False
        """Nothing is left to do with it but what follows behind."""
        self.ready = [0] * num_nodes
        """Rows offered to each node."""
        self.skipped = [0] * num_nodes
        """Rows that were taken away from each node."""
        self.expanded = [0] * num_nodes
        """Rows that each expanding node has finished."""
        self.order: dict[int, list[Row]] | None = None
        """Node with a quorum -> its rows in the order in which they became ready."""

    def state(self, i: int) -> GroupState:
        """Its state at node i, which takes groups."""
        if self.claimed >> i & 1:
            return GroupState.CLAIMED
        if self.held >> i & 1:
            return GroupState.HELD
        if not self.offered >> i & 1:
            return GroupState.GATHERING
        return GroupState.READY if self.ready[i] else GroupState.DROPPED
