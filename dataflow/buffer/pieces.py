"""Pieces: where a consumer finds the columns of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..graph import Graph
from ..node import SOURCE
from ..source import file_columns
from .leases import Lease
from .rows import Group, Part
from .segments import Segment


@dataclass(frozen=True)
class Piece:
    """Some columns of a consumer's rows, which one node wrote or the source has: `keys` say which rows of the segments are theirs.

    `keys` are sample ids, or, when `by_position`, row numbers of the one segment that holds the source.
    """

    columns: tuple[str, ...]
    keys: np.ndarray
    """[rows] int64, in the order of the consumer's rows."""
    segments: tuple[Segment, ...]
    by_position: bool = False
    of_file: bool = False
    """Whether the columns are the user's file's: they keep their types, whatever their names."""


class Pieces:
    """Where the columns that a node reads of some rows lie: found once, and cut into the shares of ranks.

    Args:
        graph: of the node.
        source: the segment with the rows of the graph's source.
        lease: the rows, and the node that reads them.
    """

    def __init__(self, graph: Graph, source: Segment | None, lease: Lease) -> None:
        node = lease.node
        by_writer: dict[tuple[str, bool], list[str]] = {}
        of_file = file_columns(graph.source)
        for column in node.reads:
            writer = node.writers[column]
            by_writer.setdefault((writer, not writer and column in of_file), []).append(column)
        self._source, self._of_file = source, of_file
        self._found: list[tuple[tuple[str, ...], np.ndarray, list[Part] | None]] = []
        """Columns, the keys of all rows, and the part of each; None: they are the source's."""
        numbers = {other.name: i for i, other in enumerate(graph.nodes)}
        for (writer, _), columns in by_writer.items():
            if not writer:
                assert source is not None, f"graph {graph.name!r} has no segment with the rows of its source"
                positions = lease.of_groups([group.position for group in lease.groups])
                self._found.append((tuple(columns), positions, None))
                continue
            level, i = graph.level_of(writer), numbers[writer]
            parts: list[Part | None] = []
            owners: list[int] = []
            for group, at, _, places in lease.taken:
                rows = group.levels[level]
                own = places if level == at else _places_on(group, at, places, level)
                if len(own) == 1:
                    parts.append(rows.parts[i][own[0]])
                else:
                    parts += map(rows.parts[i].__getitem__, own)
                if level != node.level:
                    owners += map(rows.ids.__getitem__, own)
            ids = lease.ids if level == node.level else np.array(owners, np.int64)
            self._found.append((tuple(columns), ids, [part for part in parts if part is not None]))

    def of(self, share: Sequence[int]) -> list[Piece]:
        """The pieces of some of the rows; see `cut`."""
        return self.cut([share], np.array(share, np.int64))[0]

    def cut(self, shares: Sequence[Sequence[int]], index: np.ndarray) -> list[list[Piece]]:
        """The pieces of each share of the rows.

        Args:
            shares: of each, the indexes of its rows, in the order in which they are wanted.
            index: all of these one after the other.

        Returns:
            Of each share, one piece for each node that wrote some of the columns, and one for the source. Where no row is wanted, pieces
            have no keys, and name a segment whose columns have the right types.
        """
        pieces: list[list[Piece]] = [[] for _ in shares]
        for columns, keys, parts in self._found:
            ordered, begin = keys[index], 0
            for share, own in zip(shares, pieces, strict=True):
                end = begin + len(share)
                if parts is None:
                    assert self._source is not None
                    own.append(
                        Piece(columns, ordered[begin:end], (self._source,), True, of_file=columns[0] in self._of_file)
                    )
                else:
                    of = dict.fromkeys([parts[k] for k in share or (0,)])
                    own.append(Piece(columns, ordered[begin:end], tuple([part.segment for part in of])))
                begin = end
        return pieces


def _places_on(group: Group, at: int, places: Sequence[int], level: int) -> Sequence[int]:
    """Places of the ancestors, on a level, of rows of the level `at`."""
    while at != level:
        rows = group.levels[at]
        at, places = rows.above, [0] * len(places) if rows.above == SOURCE else [rows.parents[k] for k in places]
    return places
