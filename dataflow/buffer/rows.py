"""Rows: what the ledger keeps of each row and group, what it lends out, and what it is told. No token is among it."""

from __future__ import annotations

import enum
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from ..node import Node
from .segments import Segment

MAX_CHILDREN = 4096
"""Most rows that one row may be expanded into: sample ids are set aside before it is known."""

Fate = Literal["wait", "mask", "requeue", "drop"]
"""What becomes of a group that is too old when an update claims it. It waits for a larger bound; is trained on with every
token masked (it still counts in its group's statistics); is dropped, and its prompt issued again; or is dropped."""


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


class Part:
    """A segment, how many rows were written into it, and how many of them are in flight."""

    __slots__ = ("rows", "segment", "written")

    def __init__(self, segment: Segment, written: int, rows: int) -> None:
        self.segment = segment
        self.written = written
        self.rows = rows


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
        """Row of the source that it comes from."""
        self.tokens = tokens
        self.version = version
        """Oldest policy version in it; None where no policy made it."""
        self.done = self.offered = self.leased = self.skipped = self.cancelled = 0
        """`cancelled` are the nodes that have their quorum without it; it is among the skipped there."""
        self.parts: dict[str, Part] = {}
        """Node -> where the columns lie that it wrote of this row."""
        self.children: list[Row] | None = None
        self.first_children: dict[int, int] | None = None
        """Level -> where the MAX_CHILDREN sample ids begin that are set aside for the rows of this level made of this row."""

    def state(self, i: int) -> RowState:
        """Its state at node i, which is of its level."""
        if self.done >> i & 1:
            return RowState.DONE
        if self.leased >> i & 1:
            return RowState.LEASED
        if self.skipped >> i & 1:
            return RowState.DROPPED
        return RowState.READY if self.offered >> i & 1 else RowState.BLOCKED

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
        "id",
        "levels",
        "offered",
        "open",
        "order",
        "ready",
        "rested",
        "round",
        "skipped",
        "step",
        "tokens",
        "version",
    )

    def __init__(self, id: int, round: int, tokens: int, num_levels: int, num_nodes: int) -> None:
        self.id = id
        self.round = round
        self.tokens = tokens
        """Of the row that was issued, as it was issued."""
        self.version: int | None = None
        """Policy version of the weights when its generation began."""
        self.levels: list[list[Row]] = [[] for _ in range(num_levels)]
        self.complete = [False] * num_levels
        """No more rows of this level can come."""
        self.offered = self.claimed = self.closed = 0
        """Masks of the nodes that it was offered to, that have claimed it, and that have chosen their quorum of it."""
        self.open = 0
        """(row, node) pairs not yet done or skipped."""
        self.behind = 0
        """Those of them whose node follows behind."""
        self.rested = False
        """Nothing is left to do with it but what follows behind."""
        self.step: int | None = None
        """The step whose update trained it, the last one if several did."""
        self.ready = [0] * num_nodes
        """Rows offered to each node."""
        self.skipped = [0] * num_nodes
        """Rows that were taken away from each node."""
        self.expanded = [0] * num_nodes
        """Rows that each expanding node has finished."""
        self.order: dict[int, list[Row]] | None = None
        """Node with a quorum -> its rows in the order in which they became ready."""


@dataclass
class Lease:
    """Rows claimed by one node. `token` fences: whoever holds an old one is refused."""

    token: int
    node: Node
    rows: list[Row]
    holder: str = ""
    """Who works on them, for messages."""
    deadline: float | None = None
    """When the rows go back, in seconds of the ledger's clock."""
    masked: frozenset[int] = frozenset()
    """Rows that are too old to be trained on, and are to be masked."""
    open: dict[int, Row] = field(default_factory=dict)
    """Rows not yet published, by sample id; of an EXPAND, the parents that are not finished."""
    given_up: set[int] = field(default_factory=set)
    """Parents that a quorum finished without the rest of their rows: what is still made of them is let go."""
    staged: list[tuple[list[int], Published, Segment | None]] = field(default_factory=list)
    """What was published of it and does not count yet (nodes that take groups): rows (parents of an EXPAND) and data."""

    @property
    def first_children(self) -> np.ndarray:
        """[rows] int64 where the MAX_CHILDREN sample ids begin that are set aside for the rows made of each (EXPAND only)."""
        level = self.node.makes_level
        return np.array([row.first_children[level] for row in self.rows if row.first_children and level], np.int64)

    @property
    def round(self) -> int:
        """The round in which its first row was issued."""
        return self.rows[0].group.round

    @cached_property
    def num_groups(self) -> int:
        return len({r.group.id for r in self.rows})

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
    finished: np.ndarray | None = None
    """int64 sample ids of the parents of which no more rows come (EXPAND only); None: of none."""
    newest: int = -1
    """Newest policy version of any token, when the node generated them; the log does without it."""

    def without(self, parents: Container[int]) -> Published:
        """The same but for what was made of these parents."""
        assert self.parents is not None
        kept = np.array([parent not in parents for parent in self.parents.tolist()], bool)
        finished = None if self.finished is None else self.finished[[p not in parents for p in self.finished.tolist()]]
        versions = None if self.versions is None else self.versions[kept]
        return Published(self.ids[kept], self.num_tokens[kept], versions, self.parents[kept], finished, self.newest)


@dataclass(frozen=True)
class Staleness:
    """How old the rows of an update may be, checked when they are claimed."""

    version: int
    """Of the weights that they are to train."""
    bound: int
    """Largest `version` minus that of a row's oldest token."""
    fate: Fate = "wait"

    def allows(self, rows: Sequence[Row]) -> bool:
        return all(r.version is None or r.version < 0 or self.version - r.version <= self.bound for r in rows)
