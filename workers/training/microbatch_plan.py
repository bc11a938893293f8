"""How the rows of an update are cut into optimizer steps, and these into microbatches: arithmetic that the training engine, the planner and
the simulator share, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...dataflow.graph import Node
from ..dispatch import RowCost

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
            cuts += [
                np.flatnonzero(np.isin(units, part)) for part in np.array_split(order, self.minibatches)
            ]
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
    _, group_of_row = np.unique(
        np.arange(len(lengths)) if groups is None else groups, return_inverse=True
    )
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
        room = [
            part for part in parts if part.has_room(len(rows), tokens, longest, max_tokens, pads=pads)
        ]
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
    cut: Callable[[int], list[np.ndarray]],
    cost_of: Callable[[np.ndarray], float],
    number: int,
    max_tokens: int,
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


# Prompt sharing
#
# Rows of a microbatch that share their prompt: which they are, how they are cut into microbatches,
# and where their tokens stand.
#
# The n samples of a prompt, or the two responses of a preference pair, attend to the same tokens,
# whose hidden states do not depend on what comes after them. Computed once, a prompt costs its
# tokens once, in linear layers as in attention; gradients of all responses add up in it.


GAIN = 1 / 16
"""Share of the cost that has to be left out, for rows to share prompts: their tokens are copied once more."""
_PADDED = 8
"""Keys that the responses of a microbatch look at, padded, over its tokens at most."""
_SEEN = 1 << 27
"""Pairs of queries and keys of responses, of which each has a place in a mask, at most."""


@dataclass(frozen=True)
class Placement:
    """Where the tokens of rows stand: shared prompts, then complete rows, then what comes after shared prompts."""

    prompts: np.ndarray
    """[prompts] int64: a row for each shared prompt, from which it is taken."""
    alone: np.ndarray
    """[rows alone] int64: rows that share none."""
    shared: np.ndarray
    """[rows] int64: those that do."""
    prompt_of: np.ndarray
    """[rows that share] int64: the prompt of each, among `prompts`."""
    begins: np.ndarray
    """[rows] int64: where each row goes on after its prompt."""
    last: np.ndarray
    """[rows] int64: where the last token of its prompt stands."""

    @classmethod
    def of(cls, prompts: np.ndarray, after: np.ndarray, same: np.ndarray | None) -> Placement:
        """Place rows.

        Args:
            prompts: [rows] int64 tokens of each prompt.
            after: [rows] int64 tokens that come after it.
            same: [rows], equal for rows with equal prompts; None: no row shares its prompt.
        """
        firsts = shared = prompt_of = np.zeros(0, np.int64)
        alone = np.arange(len(prompts))
        if same is not None:
            _, first, of_row, count = np.unique(
                same, return_index=True, return_inverse=True, return_counts=True
            )
            several = count[of_row] > 1
            alone, shared, firsts = np.flatnonzero(~several), np.flatnonzero(several), first[count > 1]
            prompt_of = np.searchsorted(np.flatnonzero(count > 1), of_row[shared])
        ends = np.cumsum(prompts[firsts])
        begins = np.zeros(len(prompts), np.int64)
        begins[alone] = ends[-1:].sum() + np.cumsum((prompts + after)[alone]) - after[alone]
        begins[shared] = (
            ends[-1:].sum() + (prompts + after)[alone].sum() + np.cumsum(after[shared]) - after[shared]
        )
        last = begins - 1
        last[shared] = ends[prompt_of] - 1
        return cls(firsts, alone, shared, prompt_of, begins, last)


@dataclass(frozen=True)
class SharingCost:
    """What rows cost with shared prompts and without.

    >>> long, short = np.array([100] * 8), np.array([10] * 8)
    >>> cost, same = SharingCost(RowCost(attention_length=1000)), np.zeros(8, np.int64)
    >>> cost.pays(long, long, same), cost.pays(short, long, same)
    (True, False)
    """

    row: RowCost = field(default_factory=RowCost)
    masked: bool = True
    """Whether attention computes all keys of a microbatch for each response, and masks those that it does not see; otherwise a kernel
    leaves them out."""

    def shared(self, prompts: np.ndarray, after: np.ndarray, same: np.ndarray) -> float:
        """The cost of rows, in tokens of linear layers, of which those with equal prompts share them.

        Args:
            prompts: [rows] tokens of each prompt.
            after: [rows] tokens that come after it.
            same: [rows], equal for rows with equal prompts.
        """
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
        """Whether it leaves out enough that rows share their prompts; see `shared`."""
        alone = float(self.row(prompts + after).sum())
        return self.shared(prompts, after, same) <= (1 - GAIN) * alone


def equal_prompts(
    tokens: np.ndarray,
    cu_seqlens: np.ndarray,
    counts: np.ndarray,
    cost: SharingCost,
    also: Sequence[bytes] | None = None,
) -> np.ndarray | None:
    """Which rows have equal prompts, where it pays to share them.

    Args:
        tokens: [P] int32, prompts one behind the other.
        cu_seqlens: [rows + 1].
        counts: [rows] tokens of the responses; rows without any are not computed.
        cost: of these rows.
        also: [rows] what else must be equal; None: nothing.

    Returns:
        [rows] int64, equal for equal prompts; None: rows are to share none.

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
    """Cut rows into microbatches of at most `max_tokens`, in which each prompt counts once.

    Rows of one prompt stand together, prompts with the longest rows first; where they do not fit into one microbatch, the prompt is
    computed again in the next. Rows of equal `groups` are never separated, whatever that costs.

    Args:
        prompts: [rows] int64 tokens of each prompt.
        after: [rows] int64 tokens that come after it.
        same: [rows], equal for rows with equal prompts.
        groups: [rows]; None: each row by itself.

    Returns:
        Indexes of the rows of each microbatch; none for no rows.

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
    # Units stand with those of the same prompt, and their longest row is their first.
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
    """A microbatch that is being filled."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._prompts = frozenset[int]()
        self._tokens = self._rows = self._longest_prompt = self._longest_after = 0

    def takes(self, rows: list[tuple[int, int, int]]) -> bool:
        """Put these rows (number of the prompt, its tokens, those after it) in, unless they do not fit beside what is there."""
        empty = not self._rows
        fresh = {number: tokens for number, tokens, _ in rows if number not in self._prompts}
        tokens = self._tokens + sum(fresh.values()) + sum(after for _, _, after in rows)
        count = self._rows + len(rows)
        longest_prompt = max(self._longest_prompt, *(tokens for _, tokens, _ in rows))
        longest_after = max(self._longest_after, *(after for _, _, after in rows))
        keys = count * (longest_prompt + longest_after)
        fits = tokens <= self._max_tokens and count * longest_after <= 2 * self._max_tokens
        if empty or (fits and keys <= _PADDED * self._max_tokens and keys * longest_after <= _SEEN):
            self._prompts |= fresh.keys()
            self._tokens, self._rows = tokens, count
            self._longest_prompt, self._longest_after = longest_prompt, longest_after
            return True
        return False
