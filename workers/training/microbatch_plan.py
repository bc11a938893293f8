"""How the rows of an update are cut into optimizer steps, and these into microbatches: arithmetic that the training engine, the planner and
the simulator share, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...dataflow.node import Node


@dataclass(frozen=True)
class OptimizerSteps:
    """The optimizer steps of one update: `epochs` passes over its rows, each of `minibatches` steps."""

    epochs: int = 1
    minibatches: int = 1

    @classmethod
    def of(cls, node: Node | None) -> OptimizerSteps:
        """Those of a call of this node; one, if it updates nothing."""
        if node is None or not node.operation.updates:
            return cls()
        return cls(node.arguments.get("epochs", 1), node.arguments.get("minibatches", 1))

    @property
    def number(self) -> int:
        """Of steps in all."""
        return self.epochs * self.minibatches

    def cut(self, units: np.ndarray, key: Sequence[int]) -> list[np.ndarray]:
        """The rows of each step. Units are shuffled anew in each epoch, since rows arrive as they were finished: short ones first.

        Args:
            units: [rows] number of each row's unit, from 0; rows of one unit are never separated.
            key: seeds the shuffle.

        Returns:
            Indexes of the rows of each step, in ascending order; empty ones where there are fewer units than minibatches.

        >>> [rows.tolist() for rows in OptimizerSteps(epochs=2, minibatches=2).cut(np.array([0, 0, 1, 2]), key=(3,))]
        [[2, 3], [0, 1], [0, 1, 2], [3]]
        """
        if self.minibatches == 1:
            return [np.arange(len(units))] * self.epochs
        cuts: list[np.ndarray] = []
        for epoch in range(self.epochs):
            order = np.arange(units.max(initial=-1) + 1)
            np.random.default_rng((*key, epoch)).shuffle(order)
            cuts += [np.flatnonzero(np.isin(units, part)) for part in np.array_split(order, self.minibatches)]
        return cuts


def plan_microbatches(
    lengths: np.ndarray, max_tokens: int, *, packed: bool = False, groups: np.ndarray | None = None
) -> list[np.ndarray]:
    """Cut rows into microbatches of at most `max_tokens`.

    Rows of similar length stand together, longest first, so that little is padded; a row longer than the limit is a
    microbatch of its own. Rows of equal `groups` are never separated: what holds for a row here holds for a group.

    Args:
        lengths: [rows] tokens of each row.
        packed: whether a row costs its own tokens (with the padding inside attention at most twice `max_tokens` a microbatch).
            Otherwise each row costs as much as the longest beside it.
        groups: [rows] group of each row; None: each row by itself.

    Returns:
        Indexes of the rows of each microbatch; none for no rows.

    >>> [rows.tolist() for rows in plan_microbatches(np.array([3, 9, 2, 8]), max_tokens=18)]
    [[1, 3], [0, 2]]
    >>> [rows.tolist() for rows in plan_microbatches(np.array([3, 9, 2, 8]), max_tokens=20, packed=True)]
    [[1, 3, 0], [2]]
    >>> groups = np.array([7, 7, 5, 5])
    >>> [rows.tolist() for rows in plan_microbatches(np.array([3, 9, 2, 8]), max_tokens=20, packed=True, groups=groups)]
    [[1, 0], [3, 2]]
    """
    if not len(lengths):
        return []
    _, group_of_row = np.unique(np.arange(len(lengths)) if groups is None else groups, return_inverse=True)
    longest = np.zeros(group_of_row.max() + 1, dtype=lengths.dtype)
    np.maximum.at(longest, group_of_row, lengths)
    order = np.lexsort((-lengths, group_of_row, -longest[group_of_row]))
    starts = np.flatnonzero(np.diff(group_of_row[order], prepend=-1))
    ends, sizes = (
        np.append(starts[1:], len(order)).tolist(),
        np.maximum(longest[group_of_row[order[starts]]], 1).tolist(),
    )
    totals = np.concatenate([[0], np.cumsum(lengths[order])]).tolist()
    parts, first, widest = [], 0, 0
    for start, end, size in zip(starts.tolist(), ends, sizes, strict=True):
        widest = widest or size
        rows = end - first
        fits = rows * widest <= max_tokens
        if packed:
            fits = totals[end] - totals[first] <= max_tokens and rows * widest <= 2 * max_tokens
        if start > first and not fits:
            parts.append(order[first:start])
            first, widest = start, size
    return [*parts, order[first:]]
