"""Pieces: where a consumer finds the columns of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..graph import Graph
from ..node import Node
from .rows import Part, Row
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


class Pieces:
    """Where the columns that a node reads of some rows lie: found once, and cut into the shares of ranks.

    Args:
        graph: of the node.
        source: the segment with the rows of the graph's source.
        node: of the graph.
        rows: in flight, of the node's level.
    """

    def __init__(self, graph: Graph, source: Segment | None, node: Node, rows: Sequence[Row]) -> None:
        by_writer: dict[str, list[str]] = {}
        for column in node.reads:
            by_writer.setdefault(node.writers[column], []).append(column)
        self._source = source
        self._found: list[tuple[tuple[str, ...], np.ndarray, list[Part] | None]] = []
        """Columns, the keys of all rows, and the part of each; None: they are the source's."""
        places = {other.name: i for i, other in enumerate(graph.nodes)}
        on_level: dict[int, tuple[np.ndarray, list[list[Part | None]]]] = {}
        """Level -> ids and parts of the rows, or of their ancestors, of this level."""
        for writer, columns in by_writer.items():
            if not writer:
                assert source is not None, f"graph {graph.name!r} has no segment with the rows of its source"
                positions = np.fromiter([r.group.position for r in rows], np.int64, len(rows))
                self._found.append((tuple(columns), positions, None))
                continue
            level, i = graph.level_of(writer), places[writer]
            if level not in on_level:
                owners = rows if level == node.level else [r.ancestor(level) for r in rows]
                ids = np.fromiter([r.id for r in owners], np.int64, len(owners))
                on_level[level] = ids, [r.parts for r in owners]
            ids, parts = on_level[level]
            self._found.append((tuple(columns), ids, [part for own in parts if (part := own[i])]))

    def of(self, share: Sequence[int]) -> list[Piece]:
        """The pieces of some of the rows.

        Args:
            share: indexes of rows, in the order in which they are wanted.

        Returns:
            One piece for each node that wrote some of the columns, and one for the source. Where no row is wanted, pieces have no keys,
            and name a segment whose columns have the right types.
        """
        index = np.array(share, np.int64)
        pieces: list[Piece] = []
        for columns, keys, parts in self._found:
            if parts is None:
                assert self._source is not None
                pieces.append(Piece(columns, keys[index], (self._source,), by_position=True))
            else:
                own = dict.fromkeys([parts[k] for k in share or (0,)])
                pieces.append(Piece(columns, keys[index], tuple([part.segment for part in own])))
        return pieces
