"""Choose groups of ranks that share the tokens of rows: large groups for long rows, small groups
for short ones.

Ulysses with one degree for all rows makes short rows pay for an exchange that only long rows need.
FlexSP (arXiv:2412.01523) chooses groups so that all finish at about the same time. This planner
does the same without an integer program:

- With up to 8 ranks, it tries all partitions. With more, it tries groups of equal size and groups
  of powers of two. If these are too many, it improves a few of them step by step.
- It assigns rows longest first, each to the group that would finish it first. Then it moves rows
  away from the slowest group while that helps.

Groups are fixed for the whole step; FlexSP forms new groups for each microbatch. Weft's own engine
uses one degree for all rows.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...dataflow.errors import UserError
from ...workers.dispatch import RowCost

WAYS = 256
"""Maximum number of partitions into powers of two to try; 32 ranks have 202."""
FEW_RANKS = 8
"""Up to this number of ranks, the planner tries all partitions."""


@dataclass(frozen=True)
class SequenceCost:
    """The cost of rows on groups of ranks.

    >>> cost = SequenceCost(memory_tokens=100, per_token_s=0.01, row_cost=RowCost(100), exchange_s={2: 0.001})
    >>> cost.seconds(np.array([100]), degree=2).round(3).tolist()  # (1 + 1) s over two ranks, and 50 tokens exchanged by each
    [1.05]
    """

    memory_tokens: int
    """Tokens that a rank can hold in one pass."""
    per_token_s: float
    """[s] Time of a token's linear layers, forward and backward, on one rank."""
    row_cost: RowCost = field(default_factory=RowCost)
    """Cost of a row, in units of a token's linear layers."""
    exchange_s: Mapping[int, float] = field(default_factory=dict)
    """[s] Number of ranks in a group -> time of the all-to-all exchanges for each token of a rank.
    A missing number takes the value of the next smaller one; a single rank has no exchange."""

    def seconds(self, lengths: np.ndarray, degree: int) -> np.ndarray:
        """Return the seconds of each row on a group of `degree` ranks: [rows]."""
        known = [each for each in self.exchange_s if each <= degree]
        exchange = self.exchange_s[max(known)] if known and degree > 1 else 0.0
        return (self.per_token_s * self.row_cost(lengths) + exchange * np.asarray(lengths)) / degree


@dataclass(frozen=True)
class SequenceGroups:
    """Groups of ranks, and the rows of each."""

    degrees: tuple[int, ...]
    """Number of ranks of each group, largest first."""
    rows: tuple[tuple[int, ...], ...]
    """Row indexes of each group."""
    group_s: tuple[float, ...]
    bound_s: float
    """[s] A lower bound for groups of any sizes with any assignment of rows."""

    @property
    def seconds(self) -> float:
        """[s] Time of the slowest group."""
        return max(self.group_s, default=0.0)

    @property
    def gap(self) -> float:
        """Excess of `seconds` over the lower bound, as a share of it. No plan can gain more."""
        return self.seconds / self.bound_s - 1 if self.bound_s else 0.0


def plan_groups(lengths: Sequence[int] | np.ndarray, ranks: int, cost: SequenceCost) -> SequenceGroups:
    """Divide the ranks into groups for rows of these lengths [tokens].

    Raises:
        UserError: all ranks together have no room for the longest row.

    >>> cost = SequenceCost(memory_tokens=100, per_token_s=0.01, exchange_s={8: 0.01})
    >>> plan = plan_groups([400, 100, 100, 100, 100], 8, cost)
    >>> plan.degrees, plan.rows, plan.seconds, plan.bound_s
    ((7, 1), ((0, 1, 2, 3), (4,)), 1.0, 1.0)
    """
    table = _Table(lengths, ranks, cost)
    ways = list(_all_partitions(ranks) if ranks <= FEW_RANKS else _some_partitions(ranks))
    # With too many partitions, start with some large groups and others of one smaller size, which
    # `_descended` improves.
    if len(ways) > WAYS:
        ways = list(_large_and_small(ranks))
    ways += [(size,) * (ranks // size) for size in _divisors(ranks)]
    ways.append((table.smallest, *_filled(ranks - table.smallest, (), 1)))
    found = sorted((table.dealt(way) for way in ways if table.holds(way)), key=lambda plan: plan.seconds)
    return min((_descended(table, plan) for plan in found[:3]), key=lambda plan: plan.seconds)


def equal_groups(
    lengths: Sequence[int] | np.ndarray, ranks: int, degree: int, cost: SequenceCost
) -> SequenceGroups:
    """Assign rows to groups of one size, as Ulysses does. Raises a `UserError` if the size does not
    divide the ranks, or if a group has no room for the longest row."""
    if degree < 1 or ranks % degree:
        raise UserError(f"groups of {degree} ranks do not divide {ranks} ranks")
    table = _Table(lengths, ranks, cost, also=degree)
    if not table.holds((degree,)):
        longest = int(np.max(lengths))
        raise UserError(
            f"a row of {longest:,} tokens does not fit on {degree} ranks of {cost.memory_tokens:,} tokens each"
        )
    return table.dealt((degree,) * (ranks // degree))


class _Table:
    """Seconds of each row on groups of each size, and the assignment of rows to groups. `also` is
    an additional group size."""

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, ranks: int, cost: SequenceCost, also: int = 1
    ) -> None:
        if ranks < 1:
            raise UserError(f"{ranks} ranks: at least 1")
        tokens = np.asarray(lengths, np.int64)
        # For each exchange time, the largest group with this time is the quickest.
        levels = [each - 1 for each in cost.exchange_s if 1 < each <= ranks]
        fitting = -(-int(tokens.max()) // cost.memory_tokens) if len(tokens) else 1
        sizes = {
            *range(1, min(ranks, FEW_RANKS) + 1),
            *_powers(ranks),
            *_divisors(ranks),
            *levels,
            *([fitting] if 1 <= fitting <= ranks else []),
            also,
        }
        self.degrees = tuple(sorted(sizes))
        self.smallest = min(max(fitting, 1), ranks)
        """Number of ranks in the smallest group that has room for the longest row."""
        self._ranks, self._rows = ranks, len(tokens)
        fits = tokens <= np.array(self.degrees)[:, None] * cost.memory_tokens
        seconds = np.array([cost.seconds(tokens, degree) for degree in self.degrees]).reshape(fits.shape)
        # Infinite time keeps a row away from groups without room for it.
        self._seconds = np.where(fits, seconds, math.inf)
        if len(tokens) and not fits[-1].all():
            raise UserError(
                f"a row of {int(tokens.max()):,} tokens does not fit on {self.degrees[-1]} ranks of {cost.memory_tokens:,} tokens each"
            )
        self._order = np.argsort(-tokens, kind="stable").tolist()
        self._of_degree = {d: each.tolist() for d, each in zip(self.degrees, self._seconds, strict=True)}

    def holds(self, degrees: Sequence[int]) -> bool:
        """Whether the largest of these groups has room for the longest row."""
        return not self._rows or self._of_degree[max(degrees)][self._order[0]] < math.inf

    @property
    def bound_s(self) -> float:
        """A lower bound on the time of the slowest group.

        Every row takes at least the rank-seconds of its cheapest group size, and the ranks share
        the sum of these. It also takes at least the seconds of its quickest group size.
        Rank-seconds depend on a group's size only through its exchange time, so comparing the
        table's sizes is enough.
        """
        if not self._rows:
            return 0.0
        work = (self._seconds * np.array(self.degrees)[:, None]).min(0).sum()
        return float(max(work / self._ranks, self._seconds.min(0).max()))

    def dealt(self, degrees: Sequence[int]) -> SequenceGroups:
        degrees = sorted(degrees, reverse=True)
        # Groups of one size are alike, so only the least loaded one competes.
        heaps: dict[int, list[tuple[float, int]]] = {}
        for group, degree in enumerate(degrees):
            heaps.setdefault(degree, []).append((0.0, group))
        members: list[list[int]] = [[] for _ in degrees]
        for row in self._order:
            done, degree = min((heap[0][0] + self._of_degree[d][row], d) for d, heap in heaps.items())
            members[heaps[degree][0][1]].append(row)
            heapq.heapreplace(heaps[degree], (done, heaps[degree][0][1]))
        loads = [0.0] * len(degrees)
        for heap in heaps.values():
            for load, group in heap:
                loads[group] = load
        self._relieve(degrees, members, loads)
        # Moves have added up rounding errors, so sum again.
        loads = [
            math.fsum(self._of_degree[d][row] for row in own)
            for d, own in zip(degrees, members, strict=True)
        ]
        rows = tuple(tuple(sorted(own)) for own in members)
        return SequenceGroups(tuple(degrees), rows, tuple(loads), self.bound_s)

    def _relieve(self, degrees: Sequence[int], members: list[list[int]], loads: list[float]) -> None:
        """Move or swap rows between the slowest group and others, while the larger load falls."""
        swaps = self._rows <= 64  # quadratic in the rows
        for _ in range(4 * self._rows):
            # The factor below ignores gains that are only rounding.
            slowest = max(range(len(loads)), key=loads.__getitem__)
            of, best = self._of_degree[degrees[slowest]], (loads[slowest] * (1 - 1e-9), -1, -1, -1)
            for row in members[slowest]:
                for group, degree in enumerate(degrees):
                    if group == slowest:
                        continue
                    its = self._of_degree[degree]
                    more, less = loads[group] + its[row], loads[slowest] - of[row]
                    best = min(best, (max(more, less), row, group, -1))
                    for other in members[group] if swaps else ():
                        after = max(more - its[other], less + of[other])
                        best = min(best, (after, row, group, other))
            _, row, group, other = best
            if row < 0:
                return
            its = self._of_degree[degrees[group]]
            members[slowest].remove(row)
            members[group].append(row)
            loads[slowest] -= of[row]
            loads[group] += its[row]
            if other >= 0:
                members[group].remove(other)
                members[slowest].append(other)
                loads[slowest] += of[other]
                loads[group] -= its[other]


def _descended(table: _Table, best: SequenceGroups) -> SequenceGroups:
    """Halve a group or join two of equal size, as long as that makes the plan faster."""
    while True:
        near = [way for way in _neighbours(best.degrees) if {*way} <= {*table.degrees}]
        dealt = (table.dealt(way) for way in near if table.holds(way))
        found = min(dealt, key=lambda plan: plan.seconds, default=best)
        if found.seconds >= best.seconds * (1 - 1e-9):
            return best
        best = found


def _neighbours(degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    times = Counter(degrees)
    for degree, number in times.items():
        if degree % 2 == 0:
            yield tuple((times - Counter([degree]) + Counter([degree // 2] * 2)).elements())
        if number > 1:
            yield tuple((times - Counter([degree] * 2) + Counter([2 * degree])).elements())


def _powers(ranks: int) -> tuple[int, ...]:
    return tuple(1 << k for k in range(ranks.bit_length()))


def _divisors(ranks: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, ranks + 1) if ranks % size == 0)


def _all_partitions(ranks: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """
    >>> list(_all_partitions(3))
    [(3,), (2, 1), (1, 1, 1)]
    """
    if ranks == 0:
        yield ()
    for size in range(min(ranks, largest or ranks), 0, -1):
        for rest in _all_partitions(ranks - size, size):
            yield (size, *rest)


def _some_partitions(ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield partitions of ranks into powers of two, at most `WAYS + 1`."""

    def ways(left: int, largest: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            yield ()
        for k in range(min(largest, left.bit_length() - 1), -1, -1) if left else ():
            for rest in ways(left - (1 << k), k):
                yield ((1 << k), *rest)

    for number, way in enumerate(ways(ranks, ranks.bit_length())):
        yield way
        if number >= WAYS:
            return


def _large_and_small(ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield partitions into some large groups and others of one smaller size."""
    for large in _powers(ranks):
        for small in (size for size in _powers(ranks) if size <= large):
            most = ranks // large
            for number in range(1 if small < large else most, most + 1):
                yield _filled(ranks, (large,) * number, small)


def _filled(ranks: int, large: tuple[int, ...], small: int) -> tuple[int, ...]:
    """Return a partition: the `large` groups, groups of size `small`, and powers of two."""
    number, left = divmod(ranks - sum(large), small)
    return (
        *large,
        *(small,) * number,
        *(1 << k for k in reversed(range(left.bit_length())) if left >> k & 1),
    )
