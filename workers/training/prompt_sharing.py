"""Rows of a microbatch that share their prompt: which they are, how they are cut into microbatches, and where their tokens stand.

The n samples of a prompt, or the two responses of a preference pair, attend to the same tokens, whose hidden states do not depend on what
comes after them. Computed once, a prompt costs its tokens once, in linear layers as in attention; gradients of all responses add up in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..dispatch import RowCost

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
            _, first, of_row, count = np.unique(same, return_index=True, return_inverse=True, return_counts=True)
            several = count[of_row] > 1
            alone, shared, firsts = np.flatnonzero(~several), np.flatnonzero(several), first[count > 1]
            prompt_of = np.searchsorted(np.flatnonzero(count > 1), of_row[shared])
        ends = np.cumsum(prompts[firsts])
        begins = np.zeros(len(prompts), np.int64)
        begins[alone] = ends[-1:].sum() + np.cumsum((prompts + after)[alone]) - after[alone]
        begins[shared] = ends[-1:].sum() + (prompts + after)[alone].sum() + np.cumsum(after[shared]) - after[shared]
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
        _, first, of_row, count = np.unique(same, return_index=True, return_inverse=True, return_counts=True)
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
    prompts: np.ndarray, after: np.ndarray, same: np.ndarray, max_tokens: int, *, groups: np.ndarray | None = None
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
