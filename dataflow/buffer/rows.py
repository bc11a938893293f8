"""Rows: what the ledger keeps of each row and group. No token is among it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..graph import SOURCE
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
              TOO_OLD ─────┘ a later claim allows its age
    """

    GATHERING = "gathering"
    """More of its rows may become ready."""
    READY = "ready"
    """Complete, or its quorum is reached, and a claim gets it."""
    TOO_OLD = "too_old"
    """Too old for the bound of the claims so far, and waiting for a larger one."""
    CLAIMED = "claimed"
    """Leased, or done."""
    DROPPED = "dropped"
    """It was offered, and none of its rows is left."""


class Part:
    """What one call of a node wrote, as the ledger keeps it: the segment, how many rows it has, and how many of them are in flight.
    All rows of the call share it; when the last of them is finished, the segment is freed."""

    __slots__ = ("in_flight", "row_bytes", "segment", "written")

    def __init__(self, segment: Segment, written: int, in_flight: int) -> None:
        self.segment = segment
        self.written = written
        self.row_bytes = segment.num_bytes / written if written else 0.0
        self.in_flight = in_flight


def places_in(mask: int) -> Sequence[int]:
    """The numbers of the bits that are set, ascending.

    >>> list(places_in(0b10110)), list(places_in(0b111)), list(places_in(0))
    ([1, 2, 4], [0, 1, 2], [])
    """
    if not mask & (mask - 1):
        return (mask.bit_length() - 1,) if mask else ()
    if not mask & (mask + 1):
        return range(mask.bit_length())
    places: list[int] = []
    while mask:
        lowest = mask & -mask
        places.append(lowest.bit_length() - 1)
        mask ^= lowest
    return places


def mask_of(places: Iterable[int]) -> int:
    """The mask with these bits set.

    >>> bin(mask_of([1, 2, 4]))
    '0b10110'
    """
    mask = 0
    for place in places:
        mask |= 1 << place
    return mask


class LevelRows:
    """The rows of one level of a group, as columns. A row's place is its number in the order in which they came; bit k of a mask is the
    row at place k. So what a node does with all of them, or with some, is one operation on an integer."""

    __slots__ = (
        "_places",
        "above",
        "aside",
        "cancelled",
        "done",
        "ids",
        "leased",
        "lost",
        "made_under",
        "offered",
        "parents",
        "parts",
        "skipped",
        "tokens",
        "versions",
    )

    def __init__(self, above: int, num_nodes: int) -> None:
        self.above = above
        """The level of the rows that these are made of."""
        self.ids: list[int] = []
        self.parents: list[int] = []
        """Place of the row that each was made of; 0 of a row of the source."""
        self.tokens: list[int] = []
        self.versions: list[int | None] = []
        """Oldest policy version in each; None where no policy made it."""
        none = [0] * num_nodes
        self.done, self.offered, self.leased, self.skipped = none, none.copy(), none.copy(), none.copy()
        """Node -> mask of the rows in this state there."""
        self.cancelled = none.copy()
        """Node with a quorum -> mask of those that it does without; they are among the skipped there."""
        self.lost = 0
        """Mask of those that are given up whatever was done with them."""
        self.parts: dict[int, list[Part | None]] = {}
        """Node -> where the columns lie that it wrote of each row."""
        self.aside: dict[tuple[int, int], int] | None = None
        """(place, level) -> where the MAX_CHILDREN sample ids begin that are set aside for the rows of this level made of that row."""
        self.made_under: dict[tuple[int, int], int] | None = None
        """(place, level) -> token of the latest lease under which rows of this level are made of that row."""
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def all(self) -> int:
        """Mask of all rows."""
        return (1 << len(self.ids)) - 1

    def place(self, id: int) -> int:
        """Place of a row that is here."""
        if len(self.ids) <= SEARCHED:
            return self.ids.index(id)
        known = self._places
        for place in range(len(known), len(self.ids)):
            known[self.ids[place]] = place
        return known[id]

    def add(self, id: int, parent: int, tokens: int, version: int | None) -> int:
        """One more row has come; returns the mask with its bit."""
        bit = 1 << len(self.ids)
        self.ids.append(id)
        self.parents.append(parent)
        self.tokens.append(tokens)
        self.versions.append(version)
        for column in self.parts.values():
            column.append(None)
        return bit

    def put(self, part: Part, i: int, mask: int) -> None:
        """Node i has written columns of these rows to one part."""
        if mask == self.all:
            self.parts[i] = [part] * len(self.ids)
        else:
            column = self.column(i)
            for place in places_in(mask):
                column[place] = part

    def column(self, i: int) -> list[Part | None]:
        """Where the columns lie that node i wrote of each row, for more of them to be filled in."""
        column = self.parts.get(i)
        if column is None:
            column = self.parts[i] = [None] * len(self.ids)
        return column

    def awaiting(self, i: int) -> int:
        """Mask of the rows that node i has still to finish: they are blocked, ready or leased there."""
        return self.all & ~(self.done[i] | self.skipped[i])

    def ready(self, i: int) -> int:
        """Mask of the rows that are ready for node i, which takes rows."""
        return self.offered[i] & ~(self.done[i] | self.leased[i] | self.skipped[i])

    def in_order(self, mask: int) -> Sequence[int]:
        """Places of some rows, in the order of their sample ids."""
        if not mask & (mask - 1):
            return (mask.bit_length() - 1,) if mask else ()
        return sorted(places_in(mask), key=self.ids.__getitem__)

    def first_child(self, place: int, level: int) -> int:
        """The first of the sample ids that are set aside for the rows of a level made of a row; -1: there are none."""
        return -1 if self.aside is None else self.aside.get((place, level), -1)


SEARCHED = 64
"""So many rows are looked through for an id; of more, an index is kept."""


class Group:
    """All rows that come from one issued row, on every level. Lists are indexed by level; bit i of a mask is node i."""

    __slots__ = (
        "behind",
        "claimed",
        "closed",
        "complete",
        "id",
        "issued_in",
        "levels",
        "offered",
        "open",
        "order",
        "position",
        "rested",
        "tokens",
        "too_old",
        "trained_in",
        "version",
    )

    def __init__(
        self, id: int, position: int, step: int, tokens: int, above: Sequence[int], num_nodes: int
    ) -> None:
        """
        Args:
            above: level -> the level of the rows that its rows are made of.
        """
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
        self.levels = [LevelRows(level, num_nodes) for level in above]
        self.complete = [False] * len(above)
        """No more rows of this level can come."""
        self.offered = self.too_old = self.claimed = self.closed = 0
        """Masks of the nodes that it was offered to, for which it is too old and waits, that have claimed it, and that have chosen
        their quorum of it."""
        self.open = 0
        """(row, node) pairs not yet done or skipped."""
        self.behind = 0
        """The pairs among them whose node follows behind."""
        self.rested = False
        """Nothing is left to do with it but what follows behind."""
        self.order: dict[int, list[int]] | None = None
        """Node with a quorum -> places of its rows in the order in which they became ready."""

    def state(self, i: int) -> GroupState:
        """Its state at node i, which takes groups."""
        if self.claimed >> i & 1:
            return GroupState.CLAIMED
        if self.too_old >> i & 1:
            return GroupState.TOO_OLD
        if not self.offered >> i & 1:
            return GroupState.GATHERING
        return GroupState.READY if self.num_ready(i) else GroupState.DROPPED

    def num_ready(self, i: int) -> int:
        """Rows that were offered to node i, which takes groups, and not taken away from it."""
        return sum([(rows.offered[i] & ~rows.skipped[i]).bit_count() for rows in self.levels])

    @property
    def num_rows(self) -> int:
        """On all levels."""
        return sum([len(rows.ids) for rows in self.levels])

    @property
    def num_leased(self) -> int:
        """Rows that some node has."""
        return sum([union(rows.leased).bit_count() for rows in self.levels])

    @property
    def num_dropped(self) -> int:
        """Rows that some node never sees, and that none has."""
        return sum(
            [(union(rows.skipped, rows.lost) & ~union(rows.leased)).bit_count() for rows in self.levels]
        )

    def find(self, id: int) -> Row:
        """A row of it, by its sample id."""
        for level, rows in enumerate(self.levels):
            if id in rows.ids:
                return Row(self, level, rows.place(id))
        raise KeyError(id)

    def rows(self, level: int) -> list[Row]:
        """The rows of a level, in the order in which they came."""
        return [Row(self, level, place) for place in range(len(self.levels[level].ids))]


def union(masks: Iterable[int], mask: int = 0) -> int:
    """The mask of what is in any of these."""
    for one in masks:
        mask |= one
    return mask


class Row(NamedTuple):
    """One row, to look at: its group knows everything of it."""

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
        """Oldest policy version in it; None where no policy made it."""
        return self._level.versions[self.place]

    @property
    def position(self) -> int:
        """Row of the source that it comes from."""
        return self.group.position

    @property
    def parent(self) -> Row | None:
        """The row that it was made of; None: it is of the source."""
        rows = self._level
        return None if self.level == SOURCE else Row(self.group, rows.above, rows.parents[self.place])

    def state(self, i: int) -> RowState:
        """Its state at node i, which is of its level."""
        rows, place = self._level, self.place
        if rows.done[i] >> place & 1:
            return RowState.DONE
        if rows.leased[i] >> place & 1:
            return RowState.LEASED
        if rows.skipped[i] >> place & 1:
            return RowState.DROPPED
        return RowState.READY if rows.offered[i] >> place & 1 else RowState.BLOCKED

    def ancestor(self, level: int) -> Row:
        """The row of a level that this one comes from, or itself."""
        row = self
        while row.level != level:
            row = row.parent
            assert row is not None
        return row

    def part(self, i: int) -> Part | None:
        """Where the columns lie that node i wrote of it."""
        column = self._level.parts.get(i)
        return column[self.place] if column else None

    def made(self, level: int) -> list[Row]:
        """The rows of a level that were made of this row so far."""
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
        """Its number among the rows made of its parent: the same whoever makes it, and when; 0 for a row of the source."""
        if self.level == SOURCE:
            return 0
        rows = self._level
        first = self.group.levels[rows.above].first_child(rows.parents[self.place], self.level)
        return 0 if first < 0 else self.id - first

    def draw(self, makes_level: int) -> list[int]:
        """What tells the rows of a level that are made of this row from all others of its group, on any placement and under any
        schedule (sample ids depend on both): the level, then of each row on the way to the source its number among its
        siblings, and its level. Empty for the first expansion of a row of the source.
        """
        path, row = [makes_level], self
        while row.level != SOURCE:
            path += [row.number, row.level]
            row = row.ancestor(row.group.levels[row.level].above)
        return [] if path == [1] else path
