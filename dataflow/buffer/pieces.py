"""Pieces: where a consumer finds the columns of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..graph import Graph
from ..node import SOURCE, Node
from .rows import Row
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


def find_pieces(graph: Graph, source: Segment | None, node: Node, rows: Sequence[Row]) -> list[Piece]:
    """Where the columns that a node reads of these rows lie.

    Args:
        source: the segment with the rows of the graph's source.
        node: of the graph.
        rows: in flight, of the node's level.

    Returns:
        One piece for each node that wrote some of the columns, and one for the source.
    """
    by_writer: dict[str, list[str]] = {}
    for column in node.reads:
        by_writer.setdefault(node.writers[column], []).append(column)
    pieces: list[Piece] = []
    for writer, columns in by_writer.items():
        if not writer:
            assert source is not None, f"graph {graph.name!r} has no segment with the rows of its source"
            keys = np.fromiter((r.ancestor(SOURCE).position for r in rows), np.int64, len(rows))
            pieces.append(Piece(tuple(columns), keys, (source,), by_position=True))
            continue
        level = graph.level_of(writer)
        owners = [r.ancestor(level) for r in rows]
        keys = np.fromiter((r.id for r in owners), np.int64, len(rows))
        parts = dict.fromkeys(r.parts[writer] for r in owners)
        pieces.append(Piece(tuple(columns), keys, tuple(p.segment for p in parts)))
    return pieces
