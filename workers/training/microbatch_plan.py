"""How the rows of an update are cut into optimizer steps, and these into microbatches: arithmetic that the training engine, the planner and
the simulator share, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...dataflow.graph import Node

STEPS = 128
"""Of limits that are told apart: a share of the largest one."""


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


def even_microbatches(
    lengths: np.ndarray,
    costs: np.ndarray,
    number: int,
    max_tokens: int,
    *,
    pads: bool,
    groups: np.ndarray | None = None,
) -> list[np.ndarray] | None:
    """Deal packed rows out over microbatches of about the same cost: the most expensive first, each to the cheapest one that has room.

    Where ranks compute their microbatches in lockstep, the k-th of each rank together, these take the sum over k of what the most expensive
    k-th one takes. Nothing is quicker than the cost of all rows over the ranks (ByteScale balances to that bound, arXiv:2502.21231).

    Args:
        lengths: [rows] tokens of each row.
        costs: [rows] of each row (`RowCost`).
        number: of microbatches.
        max_tokens: of a microbatch.
        pads: whether attention pads rows to the longest one beside them, to at most twice `max_tokens` a microbatch.
        groups: [rows]; rows of equal ones are never separated. None: each row by itself.

    Returns:
        Indexes of the rows of each microbatch, the most expensive first; None: the rows do not fit so.

    >>> lengths = np.array([6, 5, 4, 3, 2, 1])
    >>> [rows.tolist() for rows in even_microbatches(lengths, lengths, number=3, max_tokens=10, pads=False)]
    [[0, 5], [1, 4], [2, 3]]
    >>> even_microbatches(lengths, lengths, number=2, max_tokens=10, pads=False) is None
    True
    """
    _, unit_of_row = np.unique(np.arange(len(lengths)) if groups is None else groups, return_inverse=True)
    of_unit = np.bincount(unit_of_row, weights=costs)
    members = np.split(np.argsort(unit_of_row, kind="stable"), np.cumsum(np.bincount(unit_of_row))[:-1])
    parts = [_Part() for _ in range(number)]
    for unit in np.argsort(-of_unit, kind="stable").tolist():
        rows = members[unit].tolist()
        tokens, longest = int(lengths[rows].sum()), int(lengths[rows].max())
        room = [part for part in parts if part.has_room(len(rows), tokens, longest, max_tokens, pads=pads)]
        if not room:
            return None
        part = min(room, key=lambda part: part.cost)
        part.rows += rows
        part.tokens, part.longest = part.tokens + tokens, max(part.longest, longest)
        part.cost += float(of_unit[unit])
    parts.sort(key=lambda part: -part.cost)
    return [np.array(part.rows) for part in parts if part.rows]


@dataclass
class _Part:
    """A microbatch that is being filled."""

    rows: list[int] = field(default_factory=list)
    tokens: int = 0
    longest: int = 0
    cost: float = 0.0

    def has_room(self, rows: int, tokens: int, longest: int, max_tokens: int, *, pads: bool) -> bool:
        padded = (len(self.rows) + rows) * max(self.longest, longest) if pads else 0
        return not self.rows or (self.tokens + tokens <= max_tokens and padded <= 2 * max_tokens)


def level_microbatches(
    cut: Callable[[int], list[np.ndarray]], cost_of: Callable[[np.ndarray], float], number: int, max_tokens: int
) -> list[np.ndarray]:
    """Cut rows that stand together for a reason into up to `number` microbatches of about equally many tokens, the most expensive first.

    Full microbatches with a small last one are far above the bound of `even_microbatches`, since the last ones of ranks differ.

    Args:
        cut: cuts the rows into microbatches of at most so many tokens.
        cost_of: cost of a microbatch.
        number: of microbatches that the rank takes part in, at least those of `cut(max_tokens)`.
        max_tokens: of a microbatch.

    >>> lengths = np.array([6, 5, 4, 3, 2, 1])
    >>> def cut(limit):
    ...     return plan_microbatches(lengths, limit, packed=True)
    >>> [rows.tolist() for rows in cut(14)]
    [[0, 1], [2, 3, 4, 5]]
    >>> level = level_microbatches(cut, lambda rows: lengths[rows].sum(), number=3, max_tokens=14)
    >>> [lengths[rows].tolist() for rows in level]
    [[5, 4], [6], [3, 2, 1]]
    """
    fewer, limit = 0, max_tokens
    while limit - fewer > max(1, max_tokens // STEPS):
        middle = (fewer + limit) // 2
        if len(cut(middle)) <= number:
            limit = middle
        else:
            fewer = middle
    return sorted(cut(limit), key=cost_of, reverse=True)
