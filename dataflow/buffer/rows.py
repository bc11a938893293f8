"""Rows and groups as the ledger keeps them: ids, states and locations, but no tokens."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..graph import SOURCE
from .segments import Segment

MAX_CHILDREN = 4096
"""Most children of one row. Sample ids are reserved before their number is known."""


class Ids:
    """Id counters of a run: sample ids are unique over all graphs, group ids are in order of issue.

    >>> ids = Ids()
    >>> ids.take(3), ids.take(1), ids.take_group(), ids.take_group()
    (0, 3, 0, 1)
    """

    def __init__(self, next_id: int = 0, next_group: int = 0) -> None:
        self.next_id = next_id
        self.next_group = next_group

    def take(self, number: int) -> int:
        """Reserve `number` consecutive sample ids and return the first."""
        first, self.next_id = self.next_id, self.next_id + number
        return first

    def take_group(self) -> int:
        group, self.next_group = self.next_group, self.next_group + 1
        return group


class RowState(enum.Enum):
    """State of a row at a node of its level.

    BLOCKED ──offer──> READY ──claim──> LEASED ──publish──> DONE
       │                │ ^───release─────┘
       └─────skip───────┴──────────────────────────────────> DROPPED
    """

    BLOCKED = "blocked"
    """Waiting for other nodes, or for the rest of its group."""
    READY = "ready"
    """All earlier nodes are done with the row. For a node that takes groups, the rest of the group
    is ready as well."""
    LEASED = "leased"
    DONE = "done"
    DROPPED = "dropped"
    """The node never sees it: a filter or a quorum left it out, it was too old, or it was lost."""


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


class Part:
    """The segment that one call of a node wrote, shared by all rows of the call.

    It counts the rows written and the rows in flight. When the last row is finished, the segment is
    freed.
    """

    __slots__ = ("in_flight", "row_bytes", "segment", "written")

    def __init__(self, segment: Segment, written: int, in_flight: int) -> None:
        self.segment = segment
        self.written = written
        self.row_bytes = segment.num_bytes / written if written else 0.0
        self.in_flight = in_flight


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
    """Return the mask with these bits set.

    >>> bin(mask_of([1, 2, 4]))
    '0b10110'
    """
    mask = 0
    for place in places:
        mask |= 1 << place
    return mask


class LevelRows:
    """The rows of one level of a group, as columns.

    A row's place is its number in order of arrival; bit k of a mask is the row at place k. One
    integer operation thus updates any set of rows.
    """

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
        self.ids: list[int] = []
        self.parents: list[int] = []
        """Place of each row's parent; 0 for a row of the source."""
        self.tokens: list[int] = []
        self.versions: list[int | None] = []
        """Oldest policy version in each row; None if no policy made it."""
        none = [0] * num_nodes
        self.done, self.offered, self.leased, self.skipped = none, none.copy(), none.copy(), none.copy()
        """Node -> mask of the rows in this state there."""
        self.cancelled = none.copy()
        """Node with a quorum -> mask of the rows that it cancelled, a subset of `skipped`."""
        self.lost = 0
        """Mask of rows that were given up, whatever their state at each node."""
        self.parts: dict[int, list[Part | None]] = {}
        """Node -> part with the columns that it wrote for each row."""
        self.aside: dict[tuple[int, int], int] | None = None
        """(place, level) -> first of the MAX_CHILDREN sample ids reserved for that row's children
        on that level."""
        self.made_under: dict[tuple[int, int], int] | None = None
        """(place, level) -> token of the latest lease that makes that row's children on that level."""
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

    def add(self, id: int, parent: int, tokens: int, version: int | None) -> int:
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

    def put(self, part: Part, i: int, mask: int) -> None:
        """Note that node i wrote columns of these rows to one part."""
        if mask == self.all:
            self.parts[i] = [part] * len(self.ids)
        else:
            column = self.column(i)
            for place in places_in(mask):
                column[place] = part

    def column(self, i: int) -> list[Part | None]:
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
        return sorted(places_in(mask), key=self.ids.__getitem__)

    def first_child(self, place: int, level: int) -> int:
        """Return the first sample id reserved for a row's children on a level; -1 if none is
        reserved."""
        return -1 if self.aside is None else self.aside.get((place, level), -1)


SEARCHED = 64
"""Levels with more rows than this use an index to find an id; smaller ones search the list."""


class Group:
    """All rows that come from one issued row, on every level.

    Lists are indexed by level; bit i of a mask is node i.
    """

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
            above: level -> the level of its parents.
        """
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

    def find(self, id: int) -> Row:
        for level, rows in enumerate(self.levels):
            if id in rows.ids:
                return Row(self, level, rows.place(id))
        raise KeyError(id)

    def rows(self, level: int) -> list[Row]:
        return [Row(self, level, place) for place in range(len(self.levels[level].ids))]


def union(masks: Iterable[int], mask: int = 0) -> int:
    """Return the bitwise or of these masks."""
    for one in masks:
        mask |= one
    return mask


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

    def state(self, i: int) -> RowState:
        rows, place = self._level, self.place
        # A row may have several bits, so the order of these checks matters.
        if rows.done[i] >> place & 1:
            return RowState.DONE
        if rows.leased[i] >> place & 1:
            return RowState.LEASED
        if rows.skipped[i] >> place & 1:
            return RowState.DROPPED
        return RowState.READY if rows.offered[i] >> place & 1 else RowState.BLOCKED

    def ancestor(self, level: int) -> Row:
        """Return the row of a level that this one comes from, or itself."""
        row = self
        while row.level != level:
            row = row.parent
            assert row is not None
        return row

    def part(self, i: int) -> Part | None:
        column = self._level.parts.get(i)
        return column[self.place] if column else None

    def made(self, level: int) -> list[Row]:
        """Return the children of this row on a level."""
        rows = self.group.levels[level]
        # No node makes rows of that level from this one.
        if rows.above != self.level:
            return []
        return [
            Row(self.group, level, place)
            for place, parent in enumerate(rows.parents)
            if parent == self.place
        ]

    @property
    def number(self) -> int:
        """Its index among its parent's children, independent of worker and time; 0 for a row of the
        source."""
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
        while row.level != SOURCE:
            path += [row.number, row.level]
            row = row.ancestor(row.group.levels[row.level].above)
        # Samples of a prompt are identified by their number alone.
        return [] if path == [1] else path
