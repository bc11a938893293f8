"""Leases: rows that a node has claimed, and the results that it publishes for them.

claim ──> open ──finish──> finished
           └──release, or its deadline passes──> void: its rows are ready again, and the ledger
           rejects its holder
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import LeaseError
from ..graph import SOURCE, Graph, Node
from ..source import file_columns
from .rows import Group, Row, StoredPart
from .segments import Segment

# Published rows

NONE = np.empty(0, np.int64)

PublishedLists: TypeAlias = tuple[
    list[int], list[int], list[int] | None, list[int] | None, list[int] | None
]
"""Columns of `Published` as lists: ids, num_tokens, versions, parents, finished."""


@dataclass(frozen=True)
class Published:
    """Report of a lease holder to the ledger about rows that it has written. `ids` are finished
    rows of the lease or, for EXPAND, new rows."""

    ids: np.ndarray
    """[rows] int64 sample ids."""
    num_tokens: np.ndarray
    """[rows] int64 number of tokens that the written columns add to each row."""
    versions: np.ndarray | None = None
    """[rows] int64 policy version of each row (`row_versions`), if the node generated the rows."""
    parents: np.ndarray | None = None
    """[rows] int64 sample ids of the parents (EXPAND only)."""
    finished: np.ndarray | None = None
    """[parents] int64 sample ids of the parents that get no more children (EXPAND only)."""
    newest: int = -1
    """Newest policy version of any token; -1 if the node does not generate. Not logged."""

    @property
    def _columns(self) -> tuple[np.ndarray | None, ...]:
        return self.ids, self.num_tokens, self.versions, self.parents, self.finished

    @classmethod
    def of_lists(cls, *columns: Sequence[int] | None) -> Published:
        made: list[Any] = [None if column is None else np.array(column, np.int64) for column in columns]
        return cls(*made)

    @cached_property
    def lists(self) -> PublishedLists:
        lists: Any = [None if column is None else column.tolist() for column in self._columns]
        return tuple(lists)

    @property
    def ends_parents(self) -> bool:
        return self.finished is not None and len(self.finished) > 0

    @classmethod
    def joined(cls, parts: Sequence[Published]) -> Published:
        """Concatenate the reports of several ranks, with the same columns, for one lease."""
        if len(parts) == 1:
            return parts[0]
        columns: list[Any] = []
        for column in zip(*(part._columns for part in parts), strict=True):
            found = [values for values in column if values is not None]
            columns.append(np.concatenate(found) if found else None)
        return cls(*columns, newest=max(part.newest for part in parts))

    def not_of(self, parents: Container[int]) -> np.ndarray:
        """Return, as [rows] bool, which rows have none of these parents."""
        assert self.parents is not None
        return np.array([parent not in parents for parent in self.parents.tolist()], bool)

    def without(self, parents: Container[int]) -> Published:
        kept, finished = self.not_of(parents), self.finished
        if finished is not None:
            finished = finished[[parent not in parents for parent in finished.tolist()]]
        columns = [None if column is None else column[kept] for column in self._columns[:4]]
        return Published(*columns, finished, self.newest)  # type: ignore[arg-type]


class Spread(NamedTuple):
    """Segments with the columns of rows that several ranks wrote."""

    segments: Sequence[Segment]
    counts: Sequence[int]
    """Number of rows in each segment, in row order."""

    def only(self, kept: np.ndarray) -> Spread:
        """Return the segments with only the rows where `kept`, [rows] bool, is true."""
        parts = np.split(kept, np.cumsum(self.counts)[:-1])
        return Spread(self.segments, [int(part.sum()) for part in parts])

    def to_json(self) -> list[list[Any]]:
        """Return the form used in the log: a list of [number of rows, *segment]."""
        pairs = zip(self.counts, self.segments, strict=True)
        return [[rows, *segment.to_json()] for rows, segment in pairs]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[Any]]) -> Spread:
        return cls([Segment.from_json(one[1:]) for one in value], [one[0] for one in value])


Written: TypeAlias = Segment | Spread | None
"""Where the columns of published rows are stored; None if nothing was written."""


# Leases


class Forecast(NamedTuple):
    """Expected lengths of the rows that a node makes from each row of a lease."""

    tokens: np.ndarray
    """[rows] float64 whole tokens; all NaN if the node has made no rows yet."""
    observed: np.ndarray
    """[rows] bool: whether earlier rows of the same source row are known."""

    @property
    def is_empty(self) -> bool:
        return bool(np.isnan(self.tokens).any())

    @property
    def of_observed(self) -> np.ndarray:
        """[rows] float32 `tokens`, but NaN for rows that are not observed."""
        return np.where(self.observed, self.tokens, np.nan).astype(np.float32)


Taken: TypeAlias = tuple[Group, int, int, Sequence[int]]
"""Rows of one group in a lease: group, level, mask of the rows, and places in order of id."""


@dataclass
class Lease:
    """Rows claimed by one node, in order of group and sample id.

    `token` is a fencing token: the ledger rejects calls with the token of a lease that has ended.
    """

    token: int
    node: Node
    taken: Sequence[Taken]
    ids: np.ndarray
    """[rows] int64 sample ids."""
    num_tokens: np.ndarray
    """[rows] int64 number of tokens of each row at the claim."""
    holder: str = ""
    deadline: float | None = None
    """[s] Time on the ledger's clock at which it requeues the rows."""
    masked: frozenset[int] = frozenset()
    """Sample ids of rows that are too old to train on, so that their tokens must be masked."""
    open: dict[int, None] = field(default_factory=dict)
    """Sample ids of unpublished rows (EXPAND: of unfinished parents)."""
    given_up: set[int] = field(default_factory=set)
    """Sample ids of parents that a quorum finished early. Their new children are discarded."""
    staged: list[tuple[list[int], Published, Segment | None]] = field(default_factory=list)
    """Results of a node that takes groups: ids of the input rows, report, and segment. They take
    effect when the lease is finished."""
    forecast: Forecast | None = None
    """Balances and orders generation, if the schedule asks for it."""

    @classmethod
    def of(cls, token: int, node: Node, taken: Iterable[tuple[Group, int]], **others: Any) -> Lease:
        """Create a lease of rows, given as pairs of a group and a mask. All rows are open."""
        level, own = node.level, list[Taken]()
        ids: list[int] = []
        tokens: list[int] = []
        for group, mask in taken:
            rows = group.levels[level]
            if mask & (mask - 1):  # several rows
                places = rows.in_order(mask)
                ids += map(rows.ids.__getitem__, places)
                tokens += map(rows.tokens.__getitem__, places)
            else:
                place = mask.bit_length() - 1
                places = (place,)
                ids.append(rows.ids[place])
                tokens.append(rows.tokens[place])
            own.append((group, level, mask, places))
        columns = np.array(ids, np.int64), np.array(tokens, np.int64)
        return cls(token, node, own, *columns, open=dict.fromkeys(ids), **others)

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> list[Row]:
        """The rows as objects. `ids` and the other columns are faster."""
        return [Row(group, level, place) for group, level, _, places in self.taken for place in places]

    @cached_property
    def row_of(self) -> dict[int, Row]:
        return dict(zip(self.ids.tolist(), self.rows, strict=True))

    @cached_property
    def place_of(self) -> dict[int, int]:
        """Sample id -> index of its row."""
        return {id: place for place, id in enumerate(self.ids.tolist())}

    @cached_property
    def positions(self) -> np.ndarray:
        """[rows] int64 position of each row's source row."""
        return self.of_groups([group.position for group in self.groups])

    @property
    def groups(self) -> list[Group]:
        return [group for group, _, _, _ in self.taken]

    @property
    def first_children(self) -> np.ndarray:
        """[rows] int64 first reserved sample id of each row's children (EXPAND only)."""
        level = self.node.makes_level
        assert level is not None
        rows = [(group.levels[of], places) for group, of, _, places in self.taken]
        return np.array(
            [own.first_child(place, level) for own, places in rows for place in places], np.int64
        )

    @property
    def versions(self) -> list[int | None]:
        """Policy version of each row; None if no policy generated it."""
        rows = [(group.levels[level].versions, places) for group, level, _, places in self.taken]
        return [versions[place] for versions, places in rows for place in places]

    @property
    def step(self) -> int:
        """Step for which the first row was issued."""
        return self.taken[0][0].issued_in

    @property
    def num_groups(self) -> int:
        return len(self.taken)

    @cached_property
    def group_ids(self) -> np.ndarray:
        """[rows] int64 group id of each row."""
        return self.of_groups([group.id for group in self.groups])

    @cached_property
    def _rows_of_groups(self) -> list[int]:
        return [len(places) for _, _, _, places in self.taken]

    def of_groups(self, values: Sequence[int]) -> np.ndarray:
        """Repeat each group's value for its rows, as [rows] int64."""
        return np.repeat(np.array(values, np.int64), self._rows_of_groups)

    @cached_property
    def parent_ids(self) -> np.ndarray:
        """[rows] int64 sample id of each row's parent. Source rows are their own parents."""
        if self.node.level == SOURCE:
            return self.ids
        above = self.taken[0][0].levels[self.node.level].above if self.taken else SOURCE
        if above == SOURCE:
            return self.of_groups([group.levels[SOURCE].ids[0] for group in self.groups])
        parents = [
            (group.levels[above].ids, group.levels[level].parents, places)
            for group, level, _, places in self.taken
        ]
        return np.array([ids[of[place]] for ids, of, places in parents for place in places], np.int64)

    @property
    def source_tokens(self) -> np.ndarray:
        """[rows] int64 number of tokens of the source row of each row's group."""
        return self.of_groups([group.levels[SOURCE].tokens[0] for group in self.groups])

    def is_whole(self, published: Published) -> bool:
        """Return whether a report has all rows of the lease, in order."""
        ids = published.ids
        # Compare lengths first: this runs for every publish.
        whole = published.parents is None and len(self.open) == len(ids) == len(self.ids)
        return whole and (ids is self.ids or np.array_equal(ids, self.ids))

    def check(self, published: PublishedLists, rows: Mapping[int, Group]) -> None:
        """Raise a LeaseError if a row is not in the lease or was published before, or if columns
        differ in length. `rows` maps the sample ids of all rows in flight to their groups."""
        ids, tokens, versions, parents, finished = published
        makes, open = parents is not None, self.open
        finished = finished or []
        held = ids if parents is None else parents
        if not (all(map(open.__contains__, held)) and all(map(open.__contains__, finished))):
            id = next(id for id in (*held, *finished) if id not in open)
            what = "published row" if not makes else "made a row of" if id in held else "finished row"
            raise LeaseError(
                f"node {self.node.name!r} {what} {id}, which is not (or no longer) in lease {self.token}"
            )
        if not len(ids) == len(held) == len(tokens) == len(ids if versions is None else versions):
            lengths = {len(column) for column in (ids, held, tokens, versions) if column is not None}
            raise LeaseError(
                f"node {self.node.name!r} published columns of {sorted(lengths)} rows in lease {self.token}"
            )
        again = len(set(ids)) != len(ids) or (len(finished) > 1 and len(set(finished)) != len(finished))
        # Children must be new: neither in flight nor staged in this lease.
        if makes and not again:
            staged = {id for _, before, _ in self.staged for id in before.ids.tolist()}
            again = any(map(rows.__contains__, ids)) or any(map(staged.__contains__, ids))
        if again:
            raise LeaseError(f"node {self.node.name!r} published a row twice in lease {self.token}")


class Leases:
    """Open leases of one graph, oldest first, and the most recently released ones."""

    REMEMBERED = 1000
    """Number of void leases to remember, so that errors can give late holders the reason."""

    def __init__(self, makers: Collection[str] = ()) -> None:
        """
        Args:
            makers: names of nodes whose parents a quorum may finish early.
        """
        self._makers = makers
        self._holders: dict[tuple[str, int], Lease] = {}
        """Open lease that holds a row, keyed by (maker, sample id)."""
        self._open: dict[int, Lease] = {}
        self._void: dict[int, str] = {}
        self._deadlines: list[tuple[float, int]] = []
        """Heap of (deadline, token), including leases that ended early."""
        self._num_groups: dict[str, int] = {}
        self._given_up: list[tuple[int, int]] = []
        self.next_token = 1

    def __iter__(self) -> Iterator[Lease]:
        # Iterate over a copy, because callers release leases in the loop.
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def __getitem__(self, token: int) -> Lease:
        return self._open[token]

    def holds(self, lease: Lease) -> bool:
        return self._open.get(lease.token) is lease

    def is_void(self, token: int) -> bool:
        """Return whether the lease was released, or a rollback undid its grant."""
        return token in self._void or token >= self.next_token

    def check(self, lease: Lease) -> None:
        """Raise a LeaseError if a lease was released or finished."""
        if not self.holds(lease):
            why = self._void.get(lease.token)
            who = f"lease {lease.token} of node {lease.node.name!r}"
            raise LeaseError(f"{who} was released or finished before{f' ({why})' if why else ''}")

    def num_groups(self, node: Node) -> int:
        """Return the number of groups leased to a node that takes groups."""
        return self._num_groups.get(node.name, 0)

    def grant(self, lease: Lease) -> None:
        self._open[lease.token] = lease
        if lease.node.operation.takes_groups:
            self._num_groups[lease.node.name] = self.num_groups(lease.node) + lease.num_groups
        if lease.node.name in self._makers:
            self._holders |= {(lease.node.name, id): lease for id in lease.open}
        if lease.deadline is not None:
            heapq.heappush(self._deadlines, (lease.deadline, lease.token))

    def close(self, lease: Lease) -> None:
        del self._open[lease.token]
        if lease.node.operation.takes_groups:
            self._num_groups[lease.node.name] -= lease.num_groups
        for id in lease.ids.tolist() if lease.node.name in self._makers else ():
            # Another lease may hold a row that this lease gave back.
            if self._holders.get((lease.node.name, id)) is lease:
                del self._holders[lease.node.name, id]

    def void(self, lease: Lease, why: str) -> None:
        """Close a lease. Later calls of its holder fail with this reason."""
        self.close(lease)
        self._void[lease.token] = why
        if len(self._void) > self.REMEMBERED:
            del self._void[next(iter(self._void))]

    def take_overdue(self, now: float) -> list[Lease]:
        """Return open leases whose deadline has passed, each only once."""
        overdue: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, token = heapq.heappop(self._deadlines)
            if token in self._open:
                overdue.append(self._open[token])
        return overdue

    @property
    def next_deadline(self) -> float | None:
        """Time of the next deadline; None if no lease has a deadline."""
        return self._deadlines[0][0] if self._deadlines else None

    def give_up_parent(self, node: Node, id: int) -> None:
        """Finish a parent whose children a lease's holder is still generating."""
        lease = self._holders[node.name, id]
        del lease.open[id]
        lease.given_up.add(id)
        self._given_up.append((lease.token, id))

    def take_given_up(self) -> list[tuple[int, int]]:
        """Return (lease token, parent's sample id) of the parents given up since the last call."""
        given_up, self._given_up = self._given_up, []
        return given_up


# Columns that a node reads


@dataclass(frozen=True)
class ColumnPiece:
    """Columns of a consumer's rows that come from one node, or from the source."""

    columns: tuple[str, ...]
    keys: np.ndarray
    """[rows] int64 sample ids or, if `by_position`, row numbers in the source's segment, in the
    order of the consumer's rows."""
    segments: tuple[Segment, ...]
    by_position: bool = False
    of_file: bool = False
    """Whether the columns come from the user's file and keep its types."""


def column_pieces(
    graph: Graph,
    source: Segment | None,
    lease: Lease,
    shares: Sequence[Sequence[int]],
    index: np.ndarray,
) -> list[list[ColumnPiece]]:
    """Locate the columns that the node of a lease reads.

    Args:
        shares: for each share, the indices of its rows in the lease.
        index: all shares, concatenated.

    Returns:
        The pieces of each share: one per node that wrote columns, and up to two for the source.
    """
    node, user_columns = lease.node, file_columns(graph.source)
    by_writer: dict[tuple[str, bool], list[str]] = {}
    for column in node.reads:
        writer = node.writers[column]
        by_writer.setdefault((writer, not writer and column in user_columns), []).append(column)
    pieces: list[list[ColumnPiece]] = [[] for _ in shares]
    for (writer, of_file), columns in by_writer.items():
        names, begin = tuple(columns), 0
        if writer:
            keys, parts = _written_parts(graph, lease, writer)
        else:
            keys, parts = lease.positions, []
        ordered = keys[index]
        for share, own in zip(shares, pieces, strict=True):
            end = begin + len(share)
            if writer:
                # An empty share still needs a segment, which defines the types of its columns.
                of = dict.fromkeys([parts[k] for k in share or (0,)])
                segments = tuple([part.segment for part in of])
                own.append(ColumnPiece(names, ordered[begin:end], segments))
            else:
                assert source is not None, f"graph {graph.name!r} has no segment of its source"
                own.append(ColumnPiece(names, ordered[begin:end], (source,), True, of_file))
            begin = end
    return pieces


def _written_parts(graph: Graph, lease: Lease, writer: str) -> tuple[np.ndarray, list[StoredPart]]:
    """Return the sample ids of the rows with columns of a node, and their stored parts."""
    level = graph.level_of(writer)
    i = next(i for i, node in enumerate(graph.nodes) if node.name == writer)
    parts: list[StoredPart | None] = []
    owners: list[int] = []
    for group, at, _, places in lease.taken:
        rows = group.levels[level]
        own = places if level == at else _places_on(group, at, places, level)
        if len(own) == 1:
            parts.append(rows.parts[i][own[0]])
        else:
            parts += map(rows.parts[i].__getitem__, own)
        # The columns belong to ancestors of the lease's rows.
        if level != lease.node.level:
            owners += map(rows.ids.__getitem__, own)
    ids = lease.ids if level == lease.node.level else np.array(owners, np.int64)
    return ids, [part for part in parts if part is not None]


def _places_on(group: Group, at: int, places: Sequence[int], level: int) -> Sequence[int]:
    """Return the places on `level` of the ancestors of rows on level `at`."""
    while at != level:
        rows = group.levels[at]
        places = [0] * len(places) if rows.above == SOURCE else [rows.parents[k] for k in places]
        at = rows.above
    return places
