"""Draws: what chance decides of each row, by its place in the source and among its siblings, so that no schedule changes it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ...dataflow.buffer.rows import Row
from .costs import Generation, LinearCost


class Draws:
    """The chance of one run.

    Args:
        seed: of the cost model.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._turns: dict[tuple[str, int], dict[int, int]] = {}
        """(graph, row of the source) -> group made of it -> its number among these."""

    def lengths(self, cost: Generation, graph: str, row: Row, n: int) -> np.ndarray:
        """[n] int64 tokens of the responses to a row."""
        return cost.lengths.draw(self._key(graph, row), row.position, n)

    def passes(self, cost: LinearCost, graph: str, row: Row, node: str, *, whole_groups: bool) -> bool:
        """Whether a filter lets a row (or its group) through."""
        if cost.keep == 1:
            return True
        root = row
        while whole_groups and root.parent is not None:
            root = root.parent
        return bool(np.random.default_rng([*self._key(graph, root), zlib.crc32(node.encode())]).random() < cost.keep)

    def _key(self, graph: str, row: Row) -> list[int]:
        turns = self._turns.setdefault((graph, row.position), {})
        return draw_key(self._seed, graph, row.position, turns.setdefault(row.group.id, len(turns)), _path(row))


def draw_key(seed: int, graph: str, position: int, turn: int, path: Sequence[int] = ()) -> list[int]:
    """The seed of what is drawn for a row.

    Args:
        position: of the row of the source.
        turn: number of its group among those made of that row.
        path: number of the row among its siblings, after those of its ancestors.
    """
    return [seed, zlib.crc32(graph.encode()), position, turn, *path]


def _path(row: Row) -> list[int]:
    path: list[int] = []
    while row.parent is not None:
        path.insert(0, row.number)
        row = row.parent
    return path
