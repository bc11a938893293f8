"""Cut the rows of an update into optimizer steps, and steps into microbatches.

Plain arithmetic without torch, shared by the training engine, the planner and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...dataflow.graph import Node
from ..dispatch import RowCost

STEPS = 128
"""Resolution of the search for a token limit: the largest limit over this."""


@dataclass(frozen=True)
class OptimizerSteps:
    """The optimizer steps of one update: `epochs` passes, each of `minibatches` steps."""

    epochs: int = 1
    minibatches: int = 1

    @classmethod
    def of_node(cls, node: Node | None) -> OptimizerSteps:
        """Return the steps of one call of this node; one step for a node that updates nothing."""
        if node is None or not node.operation.updates:
            return cls()
        return cls(node.arguments.get("epochs", 1), node.arguments.get("minibatches", 1))

    @property
    def number(self) -> int:
        return self.epochs * self.minibatches

    def cut(self, units: np.ndarray, key: Sequence[int]) -> list[np.ndarray]:
        """Return the rows of each step: ascending indexes, some empty if there are fewer units than
        minibatches. Rows of one unit ([rows] numbers from 0) stay together. Units are shuffled by
        the seed `key` in each epoch, because rows arrive in the order they finished: short first.

        >>> [rows.tolist() for rows in OptimizerSteps(epochs=2, minibatches=2).cut(np.array([0, 0, 1, 2]), key=(3,))]
        [[2, 3], [0, 1], [0, 1, 2], [3]]
        """
        if self.minibatches == 1:
            return [np.arange(len(units))] * self.epochs
        cuts: list[np.ndarray] = []
        for epoch in range(self.epochs):
            order = np.arange(units.max(initial=-1) + 1)
            np.random.default_rng((*key, epoch)).shuffle(order)
            cuts += [
                np.flatnonzero(np.isin(units, part)) for part in np.array_split(order, self.minibatches)
            ]
        return cuts


def plan_microbatches(
    lengths: np.ndarray, max_tokens: int, *, packed: bool = False, groups: np.ndarray | None = None
) -> list[np.ndarray]:
    """Cut rows of these lengths ([rows] tokens) into microbatches of at most `max_tokens`. Return
    the indexes of the rows of each.

    Rows are sorted by length, longest first, to keep padding small. A row longer than the limit
    gets a microbatch to itself. A `packed` row costs only its tokens (attention may pad to at most
    twice `max_tokens` per microbatch); others cost as much as the longest row of their microbatch.
    Rows with equal `groups` ([rows]) stay together and count as one.

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
    _, group_of_row = np.unique(
        np.arange(len(lengths)) if groups is None else groups, return_inverse=True
    )
    longest = np.zeros(group_of_row.max() + 1, dtype=lengths.dtype)
    np.maximum.at(longest, group_of_row, lengths)
    # Groups by their longest row, and rows of a group by length, longest first.
    order = np.lexsort((-lengths, group_of_row, -longest[group_of_row]))
    starts = np.flatnonzero(np.diff(group_of_row[order], prepend=-1))
    ends = np.append(starts[1:], len(order)).tolist()
    sizes = np.maximum(longest[group_of_row[order[starts]]], 1).tolist()
    totals = np.concatenate([[0], np.cumsum(lengths[order])]).tolist()
    parts, first, widest = [], 0, 0
    for start, end, size in zip(starts.tolist(), ends, sizes, strict=True):
        # Groups come longest first, so the first one of a microbatch determines its width.
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
    """Distribute packed rows with these lengths and costs (`RowCost`; [rows] each) over `number`
    microbatches of similar cost: the most expensive row first, each into the cheapest microbatch
    with room. Return the indexes of the rows of each, the most expensive first, or None if the rows
    do not fit. If attention `pads` rows to the longest of their microbatch, then to at most twice
    `max_tokens`. For `groups`, see `plan_microbatches`.

    Ranks compute microbatches in lockstep, so a step takes the sum over k of the most expensive
    k-th microbatch of any rank. The lower bound is the cost of all rows divided by the ranks
    (ByteScale balances to that bound, arXiv:2502.21231).

    >>> lengths = np.array([6, 5, 4, 3, 2, 1])
    >>> [rows.tolist() for rows in even_microbatches(lengths, lengths, number=3, max_tokens=10, pads=False)]
    [[0, 5], [1, 4], [2, 3]]
    >>> even_microbatches(lengths, lengths, number=2, max_tokens=10, pads=False) is None
    True
    """
    _, unit_of_row = np.unique(
        np.arange(len(lengths)) if groups is None else groups, return_inverse=True
    )
    of_unit = np.bincount(unit_of_row, weights=costs)
    members = np.split(np.argsort(unit_of_row, kind="stable"), np.cumsum(np.bincount(unit_of_row))[:-1])
    parts = [_Part() for _ in range(number)]
    for unit in np.argsort(-of_unit, kind="stable").tolist():
        rows = members[unit].tolist()
        tokens, longest = int(lengths[rows].sum()), int(lengths[rows].max())
        room = [
            part for part in parts if part.has_room(len(rows), tokens, longest, max_tokens, pads=pads)
        ]
        if not room:
            return None
        part = min(room, key=lambda part: part.cost)
        part.rows += rows
        part.tokens, part.longest = part.tokens + tokens, max(part.longest, longest)
        part.cost += float(of_unit[unit])
    # Ranks compute their k-th microbatches together, so similar costs must meet.
    parts.sort(key=lambda part: -part.cost)
    return [np.array(part.rows) for part in parts if part.rows]


@dataclass
class _Part:
    rows: list[int] = field(default_factory=list)
    tokens: int = 0
    longest: int = 0
    cost: float = 0.0

    def has_room(self, rows: int, tokens: int, longest: int, max_tokens: int, *, pads: bool) -> bool:
        padded = (len(self.rows) + rows) * max(self.longest, longest) if pads else 0
        return not self.rows or (self.tokens + tokens <= max_tokens and padded <= 2 * max_tokens)


def level_microbatches(
    cut: Callable[[int], list[np.ndarray]],
    cost_of: Callable[[np.ndarray], float],
    number: int,
    max_tokens: int,
) -> list[np.ndarray]:
    """Cut rows into up to `number` microbatches (at least `len(cut(max_tokens))`) of similar size
    without changing their order, and return the most expensive first. `cut` cuts the rows into
    microbatches of at most the given number of tokens.

    Full microbatches followed by a small one cost far more than the bound of `even_microbatches`,
    because the last microbatches of ranks differ.

    >>> lengths = np.array([6, 5, 4, 3, 2, 1])
    >>> def cut(limit):
    ...     return plan_microbatches(lengths, limit, packed=True)
    >>> level = level_microbatches(cut, lambda rows: lengths[rows].sum(), number=3, max_tokens=14)
    >>> [lengths[rows].tolist() for rows in level]
    [[5, 4], [6], [3, 2, 1]]
    """
    fewer, limit = 0, max_tokens
    # Bisect for the smallest limit that needs at most `number` microbatches.
    while limit - fewer > max(1, max_tokens // STEPS):
        middle = (fewer + limit) // 2
        if len(cut(middle)) <= number:
            limit = middle
        else:
            fewer = middle
    return sorted(cut(limit), key=cost_of, reverse=True)


# Prompt sharing: the samples of a prompt attend to the same prompt tokens, whose hidden states do
# not depend on later tokens. A microbatch computes such a prompt once, and the gradients of all its
# responses add up in it.


GAIN = 1 / 16
"""Share of the cost that sharing must save, because it copies shared tokens once more."""
_PADDED = 8
"""Limit on padded keys of the responses of a microbatch, as a multiple of its tokens."""
_SEEN = 1 << 27
"""Limit on query-key pairs of responses; each takes an element of a mask."""


@dataclass(frozen=True)
class SharingCost:
    """Compare the cost of rows with and without shared prompts.

    >>> long, short = np.array([100] * 8), np.array([10] * 8)
    >>> cost, same = SharingCost(RowCost(attention_length=1000)), np.zeros(8, np.int64)
    >>> cost.pays(long, long, same), cost.pays(short, long, same)
    (True, False)
    """

    row: RowCost = field(default_factory=RowCost)
    masked: bool = True
    """Whether attention computes all keys of a microbatch for each response and masks the rest.
    Otherwise a kernel skips them."""

    def shared(self, prompts: np.ndarray, after: np.ndarray, same: np.ndarray) -> float:
        """Return the cost of rows that share prompts, in tokens; arguments as in `plan_shared`."""
        _, first, of_row, count = np.unique(
            same, return_index=True, return_inverse=True, return_counts=True
        )
        several = count[of_row] > 1
        alone = self.row((prompts + after)[~several]).sum()
        before, own = prompts[several], after[several].astype(np.float64)
        seen = own * (before + own if self.masked else before + own / 2)
        once = self.row(prompts[first[count > 1]]).sum()
        return float(alone + once + (own + 2 * seen / self.row.attention_length).sum())

    def pays(self, prompts: np.ndarray, after: np.ndarray, same: np.ndarray) -> bool:
        """Return whether sharing prompts saves enough to be worth its copies; see `shared`."""
        alone = float(self.row(prompts + after).sum())
        return self.shared(prompts, after, same) <= (1 - GAIN) * alone


def equal_prompts(
    tokens: np.ndarray,
    cu_seqlens: np.ndarray,
    counts: np.ndarray,
    cost: SharingCost,
    also: Sequence[bytes] | None = None,
) -> np.ndarray | None:
    """Find rows with equal prompts: [rows] int64, equal for equal prompts; None if sharing them is
    not worth its copies. Prompts are [P] int32 `tokens` end to end, with [rows + 1] bounds. `counts`
    ([rows]) are tokens of the responses; rows without tokens are not computed. `also` ([rows]) is
    other content that must be equal too.

    >>> equal_prompts(np.array([7, 8, 7, 8, 9]), np.array([0, 2, 4, 5]), np.array([1, 1, 1]), SharingCost()).tolist()
    [0, 0, 1]
    """
    numbers: dict[tuple[bytes, bytes], int] = {}
    found = np.empty(len(counts), np.int64)
    for row in range(len(counts)):
        prompt = tokens[cu_seqlens[row] : cu_seqlens[row + 1]].tobytes()
        found[row] = numbers.setdefault((prompt, also[row] if also else b""), len(numbers))
    rows = np.flatnonzero(counts)
    return found if cost.pays(np.diff(cu_seqlens)[rows], counts[rows], found[rows]) else None


def plan_shared(
    prompts: np.ndarray,
    after: np.ndarray,
    same: np.ndarray,
    max_tokens: int,
    *,
    groups: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Cut rows into microbatches of at most `max_tokens`, counting each shared prompt once. Return
    the indexes of the rows of each. Rows have these tokens of prompts and after prompts, [rows] int64
    each; `same` is equal for rows with equal prompts.

    Rows of one prompt stay together, prompts with the longest rows first. A prompt whose rows fill
    several microbatches is computed in each. Rows with equal `groups` ([rows]) stay together.

    >>> rows = plan_shared(np.array([6, 6, 6, 2]), np.array([1, 2, 3, 5]), np.array([0, 0, 0, 1]), max_tokens=12)
    >>> [part.tolist() for part in rows]
    [[2, 1, 0], [3]]
    """
    if not len(prompts):
        return []
    unit_of = np.arange(len(prompts)) if groups is None else np.unique(groups, return_inverse=True)[1]
    lengths = prompts + after
    order = np.lexsort((-lengths, unit_of))
    units = np.split(order, np.flatnonzero(np.diff(unit_of[order])) + 1)
    longest = np.zeros(int(same.max()) + 1, np.int64)
    np.maximum.at(longest, same, lengths)
    # Sort units by prompt; the first row of a unit is its longest.
    units.sort(key=lambda rows: (-longest[same[rows[0]]], same[rows[0]], -lengths[rows[0]], rows[0]))
    parts: list[list[int]] = []
    filling = _Filling(max_tokens)
    for unit in units:
        rows = [(int(same[row]), int(prompts[row]), int(after[row])) for row in unit.tolist()]
        if not parts or not filling.takes(rows):
            parts.append([])
            filling = _Filling(max_tokens)
            filling.takes(rows)
        parts[-1] += unit.tolist()
    return [np.array(part) for part in parts]


class _Filling:
    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._prompts = frozenset[int]()
        self._tokens = self._rows = self._longest_prompt = self._longest_after = 0

    def takes(self, rows: list[tuple[int, int, int]]) -> bool:
        """Add rows (prompt number, prompt tokens, tokens after it). Return whether they fit."""
        empty = not self._rows
        fresh = {number: tokens for number, tokens, _ in rows if number not in self._prompts}
        tokens = self._tokens + sum(fresh.values()) + sum(after for _, _, after in rows)
        count = self._rows + len(rows)
        longest_prompt = max(self._longest_prompt, *(tokens for _, tokens, _ in rows))
        longest_after = max(self._longest_after, *(after for _, _, after in rows))
        keys = count * (longest_prompt + longest_after)
        fits = tokens <= self._max_tokens and count * longest_after <= 2 * self._max_tokens
        # An empty microbatch takes any unit, so that every row gets a place.
        if empty or (fits and keys <= _PADDED * self._max_tokens and keys * longest_after <= _SEEN):
            self._prompts |= fresh.keys()
            self._tokens, self._rows = tokens, count
            self._longest_prompt, self._longest_after = longest_prompt, longest_after
            return True
        return False
