"""Split the rows of an update into optimizer steps, and steps into microbatches.

The training engine, the memory planner and the simulator share this code, which needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...dataflow.graph import Node
from ..dispatch import RowCost, pays

STEPS = 128
"""The search for a token limit stops at this fraction of the largest limit (1/128)."""


@dataclass(frozen=True)
class OptimizerSteps:
    """The optimizer steps of one update: `epochs` passes over the rows, each of `minibatches`
    steps."""

    epochs: int = 1
    minibatches: int = 1

    @classmethod
    def of_node(cls, node: Node | None) -> OptimizerSteps:
        """Return the optimizer steps of one call of this node; one step if it updates nothing."""
        if node is None or not node.operation.updates:
            return cls()
        return cls(node.arguments.get("epochs", 1), node.arguments.get("minibatches", 1))

    @property
    def number(self) -> int:
        return self.epochs * self.minibatches

    def cut(self, units: np.ndarray, key: Sequence[int]) -> list[np.ndarray]:
        """Return the rows of each step, as ascending indexes. Some steps are empty if there are
        fewer units than minibatches. Rows with the same unit ([rows] numbers from 0) stay together.
        Each epoch shuffles the units with the seed `key`, because short rows arrive first.

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
    """Split rows of these lengths ([rows] tokens) into microbatches of at most `max_tokens`, and
    return the row indexes of each.

    The longest rows come first, to keep padding small. A row longer than the limit gets its own
    microbatch. A `packed` row costs only its tokens, although attention may pad a microbatch to at
    most twice `max_tokens`. Other rows cost as much as their microbatch's longest. Rows with equal
    `groups` ([rows]) stay together, as one unit.

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
    # Sort groups by their longest row, and the rows of a group by length, longest first.
    order = np.lexsort((-lengths, group_of_row, -longest[group_of_row]))
    starts = np.flatnonzero(np.diff(group_of_row[order], prepend=-1))
    ends = np.append(starts[1:], len(order)).tolist()
    sizes = np.maximum(longest[group_of_row[order[starts]]], 1).tolist()
    totals = np.concatenate([[0], np.cumsum(lengths[order])]).tolist()
    parts, first, widest = [], 0, 0
    for start, end, size in zip(starts.tolist(), ends, sizes, strict=True):
        # Groups come longest first, so the first group of a microbatch determines its width.
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
    """Distribute packed rows over `number` microbatches of similar cost: the most expensive rows
    first, each into the cheapest microbatch with room. Each row has a length and a cost
    (`RowCost`), [rows] each. Return the row indexes of each microbatch, most expensive first, or
    None if the rows do not fit. If attention `pads` rows to their microbatch's longest, a
    microbatch has at most twice `max_tokens` padded tokens. For `groups`, see `plan_microbatches`.

    Ranks compute microbatches in lockstep, so the duration of a step is a sum over k: the cost of
    the most expensive k-th microbatch on any rank. It is at least the total cost divided by the
    number of ranks (ByteScale balances to that bound, arXiv:2502.21231).

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
    # Ranks compute their k-th microbatches together, so sorting aligns those of similar cost.
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
    """Split rows into up to `number` microbatches (or `len(cut(max_tokens))` if that is more) of
    similar size, most expensive first, without reordering rows. `cut` splits the rows into
    microbatches of at most a given number of tokens.

    Full microbatches followed by a small one would cost far more than the bound of
    `even_microbatches`, because the last ones differ between ranks.

    >>> lengths = np.array([6, 5, 4, 3, 2, 1])
    >>> def cut(limit):
    ...     return plan_microbatches(lengths, limit, packed=True)
    >>> level = level_microbatches(cut, lambda rows: lengths[rows].sum(), number=3, max_tokens=14)
    >>> [lengths[rows].tolist() for rows in level]
    [[5, 4], [6], [3, 2, 1]]
    """
    fewer, limit = 0, max_tokens
    # Bisect for the smallest token limit that needs at most `number` microbatches.
    while limit - fewer > max(1, max_tokens // STEPS):
        middle = (fewer + limit) // 2
        if len(cut(middle)) <= number:
            limit = middle
        else:
            fewer = middle
    return sorted(cut(limit), key=cost_of, reverse=True)


# Prompt sharing: all samples of a prompt attend to the same prompt tokens, whose hidden states do
# not depend on later tokens. So a microbatch computes the prompt once, and accumulates the
# gradients of all its responses there.


_PADDED = 8
"""Limit on the padded keys of a microbatch's responses, as a multiple of its tokens."""
_SEEN = 1 << 27
"""Limit on the query-key pairs of a microbatch's responses, each one element of a mask."""


@dataclass(frozen=True)
class SharingCost:
    """Compares the cost of rows with and without shared prompts.

    >>> long, short = np.array([100] * 8), np.array([10] * 8)
    >>> cost, same = SharingCost(RowCost(attention_length=1000)), np.zeros(8, np.int64)
    >>> cost.pays(long, long, same), cost.pays(short, long, same)
    (True, False)
    """

    row: RowCost = field(default_factory=RowCost)
    masked: bool = True
    """Whether attention computes all keys of a microbatch for each response and masks other rows'
    keys, instead of skipping them in the kernel."""

    def shared(self, prompts: np.ndarray, after: np.ndarray, same: np.ndarray) -> float:
        """Return the cost in tokens of rows that share prompts; for the arguments see
        `plan_shared`."""
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
        """Return whether prompt sharing saves more than its copies cost; for the arguments see
        `plan_shared`."""
        alone = float(self.row(prompts + after).sum())
        return pays(self.shared(prompts, after, same), alone)


def equal_prompts(
    tokens: np.ndarray,
    cu_seqlens: np.ndarray,
    counts: np.ndarray,
    cost: SharingCost,
    also: Sequence[bytes] | None = None,
) -> np.ndarray | None:
    """Return an id per row that is equal for equal prompts ([rows] int64), or None if sharing is
    not worth its copies. `tokens` ([P] int32) are all prompts end to end, delimited by the
    [rows + 1] bounds. `counts` ([rows]) are response tokens per row; rows without any are free.
    `also` ([rows]) identifies other content that must be equal, such as images.

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
    """Split rows into microbatches of at most `max_tokens`, counting each shared prompt once, and
    return the row indexes of each. Arguments are [rows] int64: tokens of the prompt, tokens after
    the prompt, and `same`, which is equal for rows with equal prompts.

    Prompts with the longest rows come first. Rows of a prompt stay together; if they fill several
    microbatches, each computes the prompt. Rows with equal `groups` ([rows]) stay together.

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
    # Sort units by prompt; a unit's first row is its longest.
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
        """Add rows, each as (prompt number, prompt tokens, tokens after the prompt), if they fit.
        Return whether they did."""
        empty = not self._rows
        fresh = {number: tokens for number, tokens, _ in rows if number not in self._prompts}
        tokens = self._tokens + sum(fresh.values()) + sum(after for _, _, after in rows)
        count = self._rows + len(rows)
        longest_prompt = max(self._longest_prompt, *(tokens for _, tokens, _ in rows))
        longest_after = max(self._longest_after, *(after for _, _, after in rows))
        keys = count * (longest_prompt + longest_after)
        fits = tokens <= self._max_tokens and count * longest_after <= 2 * self._max_tokens
        # An empty microbatch accepts any unit, so that every row finds a place.
        if empty or (fits and keys <= _PADDED * self._max_tokens and keys * longest_after <= _SEEN):
            self._prompts |= fresh.keys()
            self._tokens, self._rows = tokens, count
            self._longest_prompt, self._longest_after = longest_prompt, longest_after
            return True
        return False
