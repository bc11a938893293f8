"""Dispatch protocols: how to split a call's rows over ranks, and which ranks' results to keep.

A protocol is a pair of functions of the ranks' mesh coordinates, so the driver knows nothing about
tensor or pipeline parallelism. Built-in protocols are attributes of `Dispatch`. To add one:

>>> def first_rank_only(rows, mesh):
...     return [list(range(len(rows)))] + [None] * (len(mesh) - 1)
>>> mine = Dispatch("first_rank_only", distribute=first_rank_only, collect=lambda mesh: [0])
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from .models.model_folder import read_model_config
from .models.transformer import Transformer


@dataclass(frozen=True)
class Coordinates:
    """Position of a rank in its group's mesh. Ranks with equal `dp` form a replica."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    micro_dp: int = 0
    """Index of the generation replica within a training replica, if the same ranks generate with
    fewer shards and stages (HybridFlow's micro-DP groups, arXiv:2409.19256;
    `generation_coordinates` in `resharding/formulas.py`)."""


@dataclass(frozen=True)
class RowSizes:
    """What a protocol knows about rows. It does not see their contents."""

    num_tokens: np.ndarray
    """[rows] tokens in each row."""
    group_ids: np.ndarray
    """[rows] each row's group."""
    whole_groups: bool = False
    """Whether the rows of a group must stay together."""
    costs: np.ndarray | None = None
    """[rows] cost of computing each row by itself (`RowCost`). Default: its number of tokens."""
    prompt_costs: np.ndarray | None = None
    """[rows] part of each row's cost that a replica pays only once for all its rows of a group: the
    cost of their prompt. None if rows share no computation."""

    def __len__(self) -> int:
        return len(self.num_tokens)


Shares = Sequence[Sequence[int] | None]
"""Indices of each rank's rows; None for a rank that is not called."""


@dataclass(frozen=True)
class Dispatch:
    """A dispatch protocol.

    Args:
        distribute: returns each rank's share of the rows.
        collect: returns the ranks whose results to keep. Choose one rank per replica, because a row
            that two ranks return would count twice.
    """

    name: str
    distribute: Callable[[RowSizes, Sequence[Coordinates]], Shares]
    collect: Callable[[Sequence[Coordinates]], list[int]]

    ONE_TO_ALL: ClassVar[Dispatch]
    """Every rank gets the same rows and arguments. Calls with rows keep the first rank's result;
    other calls keep all ranks' results."""
    SPLIT_BY_DP: ClassVar[Dispatch]
    """Split rows over data-parallel replicas, balanced by cost. A replica's ranks get the same
    rows. If rows share the computation of their prompt, a group's rows stay together unless
    splitting them balances better."""
    SPLIT_BY_GENERATION_DP: ClassVar[Dispatch]
    """Split rows over generation replicas: each `micro_dp` of each `dp`. All ranks of a generation
    replica (its pipeline stages and tensor-parallel shards) get the same rows."""

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"

    def __reduce__(self) -> str | tuple[object, ...]:
        # Pickle built-in protocols by name, so that `is` works in other processes.
        if getattr(Dispatch, self.name, None) is self:
            return getattr, (Dispatch, self.name)
        return Dispatch, (self.name, self.distribute, self.collect)


def balance(sizes: Sequence[float] | np.ndarray, parts: int) -> list[list[int]]:
    """Split rows with these costs into parts with similar totals: assign each row, the most
    expensive first, to the part with the lowest total so far. Ties go to the first such part.

    >>> balance([5, 1, 1, 3], 2)
    [[0], [1, 2, 3]]
    """
    if parts == 1:
        return [list(range(len(sizes)))]
    return _balanced(sizes, parts)[0]


def _balanced(sizes: Sequence[float] | np.ndarray, parts: int) -> tuple[list[list[int]], float]:
    """Return the parts of `balance`, and the highest total."""
    heap = [(0, part) for part in range(parts)]
    out: list[list[int]] = [[] for _ in range(parts)]
    tokens = np.asarray(sizes)
    order = np.argsort(-tokens, kind="stable")
    for index, size in zip(order.tolist(), tokens[order].tolist(), strict=True):
        load, part = heap[0]
        out[part].append(index)
        heapq.heapreplace(heap, (load + max(1, size), part))
    return [part if len(part) < 2 else sorted(part) for part in out], max(heap)[0]


def _split_by_dp(rows: RowSizes, mesh: Sequence[Coordinates]) -> Shares:
    parts = _split(rows, max(c.dp for c in mesh) + 1)
    return [parts[c.dp] for c in mesh]


def _split_by_generation_dp(rows: RowSizes, mesh: Sequence[Coordinates]) -> Shares:
    replicas = sorted({(c.dp, c.micro_dp) for c in mesh})
    parts = dict(zip(replicas, _split(rows, len(replicas)), strict=True))
    return [parts[c.dp, c.micro_dp] for c in mesh]


def _split(rows: RowSizes, replicas: int) -> list[list[int]]:
    costs = rows.num_tokens if rows.costs is None else rows.costs
    shared = rows.prompt_costs
    if replicas == 1 or not len(rows) or (shared is None and not rows.whole_groups):
        return balance(costs, replicas)
    _, group_of = np.unique(rows.group_ids, return_inverse=True)
    own = costs if shared is None else costs - shared
    # The rows of each group, the most expensive first.
    order = np.lexsort((-own, group_of))
    starts = np.flatnonzero(np.diff(group_of[order], prepend=-1))
    groups = np.split(order, starts[1:])
    of_groups = np.add.reduceat(own[order], starts)
    if shared is not None:
        prompts = shared[order[starts]]
        of_groups = of_groups + prompts
        if not rows.whole_groups:
            if pays(float(of_groups.sum()), float(costs.sum())):
                return _split_by_prompt(costs, own, groups, of_groups, prompts, replicas)
            return balance(costs, replicas)
    return _joined(groups, balance(of_groups, replicas))


def _joined(pieces: Sequence[np.ndarray], parts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the rows of each part, in ascending order."""
    return [sorted(row for piece in part for row in pieces[piece].tolist()) for part in parts]


# Rows that share a prompt. A replica computes the prompt once for all its rows of a group, so a
# group on two replicas costs its prompt twice.

_GOOD = 0.005
"""Stop if the highest load exceeds the mean by at most this share."""
_LARGEST = 0.75
"""Largest piece of a group before the search, as a share of the mean load. Smaller pieces balance
better, but repeat more prompts."""
_CHOSEN = 8
"""Try all subsets of this many rows."""
_SUBSETS = [((np.arange(1 << n)[:, None] >> np.arange(n)) & 1).astype(float) for n in range(_CHOSEN + 1)]


def _split_by_prompt(
    costs: np.ndarray,
    own: np.ndarray,
    groups: Sequence[np.ndarray],
    of_groups: np.ndarray,
    prompts: np.ndarray,
    replicas: int,
) -> list[list[int]]:
    """Split rows so that the highest load is low, and repeat few prompts.

    Args:
        costs: [rows] cost of each row by itself.
        own: [rows] cost of each row without its prompt.
        groups: the rows of each group, the most expensive first.
        of_groups: [groups] cost of all rows of each group, with one prompt.
        prompts: [groups] cost of each group's prompt.

    Returns:
        The rows of each replica.
    """
    mean, longest = float(of_groups.sum()) / replicas, float(costs.max())
    if longest >= mean:
        # No split is faster than the longest row, and single rows are the simplest split.
        parts, highest = _balanced(costs, replicas)
        if highest <= (1 + _GOOD) * longest:
            return parts
    whole = _Pieces(own, groups, of_groups, prompts, mean, replicas)
    if whole.is_level:
        return whole.parts
    pieces = _Pieces(own, groups, of_groups, prompts, _LARGEST * mean, replicas)
    pieces.level()
    return min(whole, pieces, key=lambda each: each.highest).parts


class _Pieces:
    """Pieces of groups on replicas.

    `level` lowers the highest load step by step. The busiest replica exchanges a piece with another
    replica, or moves rows of a piece to the idlest replica, which then computes the prompt too.
    """

    def __init__(
        self,
        own: np.ndarray,
        groups: Sequence[np.ndarray],
        of_groups: np.ndarray,
        prompts: np.ndarray,
        largest: float,
        replicas: int,
    ) -> None:
        """Divide groups into pieces of at most about `largest`, and balance them. For the other
        arguments see `_split_by_prompt`."""
        self._own, self._rows, self._prompts = own, list(groups), prompts.tolist()
        costs = of_groups.tolist()
        for group in np.flatnonzero(of_groups > (1 + _GOOD) * largest).tolist():
            rows, prompt = groups[group], self._prompts[group]
            number = min(len(rows), math.ceil(costs[group] / largest - _GOOD))
            first, *others = (rows[part] for part in balance(own[rows], number))
            self._rows[group], costs[group] = first, prompt + float(own[first].sum())
            self._rows += others
            self._prompts += [prompt] * len(others)
            costs += [prompt + float(own[part].sum()) for part in others]
        self._costs, self._home = np.array(costs), np.empty(len(costs), np.int64)
        for replica, pieces in enumerate(balance(costs, replicas)):
            self._home[pieces] = replica
        self._load = np.bincount(self._home, weights=self._costs, minlength=replicas)

    @property
    def highest(self) -> float:
        return float(self._load.max())

    @property
    def is_level(self) -> bool:
        return self.highest <= (1 + _GOOD) * float(self._load.mean())

    @property
    def parts(self) -> list[list[int]]:
        parts: list[list[int]] = [[] for _ in self._load]
        for piece, replica in enumerate(self._home.tolist()):
            parts[replica].append(piece)
        return _joined(self._rows, parts)

    def level(self) -> None:
        load = self._load
        for _ in range(4 * len(load)):
            busiest, idlest, mean = int(load.argmax()), int(load.argmin()), float(load.mean())
            highest = float(load[busiest])
            if highest <= (1 + _GOOD) * mean:
                return
            lower, change = self._best_exchange(busiest, idlest)
            if lower - mean > (highest - mean) / 2:
                divided, divide = self._best_division(busiest, idlest, mean)
                if divided < lower:
                    lower, change = divided, divide
            if lower >= highest * (1 - 1e-9):
                return
            change()

    def _best_exchange(self, busiest: int, idlest: int) -> tuple[float, Callable[[], None]]:
        """Find the best exchange of a piece of the busiest replica for a piece of another replica, or
        for nothing. Return the higher load of the two replicas afterwards, and the exchange."""
        load, costs, home = self._load, self._costs, self._home
        mine = np.flatnonzero(home == busiest)
        own = costs[mine]
        given = own[:, None] - costs
        highest = np.maximum(load[busiest] - given, load[home] + given)
        highest[:, mine] = math.inf
        mine_at, theirs = divmod(int(highest.argmin()), len(costs))
        best, moved = float(highest[mine_at, theirs]), float(given[mine_at, theirs])
        alone = np.maximum(load[busiest] - own, load[idlest] + own)
        given_away = int(alone.argmin())
        if alone[given_away] < best:
            best, moved = float(alone[given_away]), float(own[given_away])
            mine_at, theirs = given_away, -1

        def exchange() -> None:
            other = idlest if theirs < 0 else int(home[theirs])
            if theirs >= 0:
                home[theirs] = busiest
            home[mine[mine_at]] = other
            load[busiest] -= moved
            load[other] += moved

        return best, exchange

    def _best_division(self, busiest: int, idlest: int, mean: float) -> tuple[float, Callable[[], None]]:
        """Like `_best_exchange`, but move some rows of a piece to the idlest replica."""
        own, load = self._own, self._load
        high, low = float(load[busiest]), float(load[idlest])
        best, which, taken = math.inf, -1, np.zeros(0, bool)
        for piece in np.flatnonzero(self._home == busiest).tolist():
            rows, prompt = self._rows[piece], self._prompts[piece]
            if len(rows) < 2 or low + prompt >= high:
                continue
            costs = own[rows]
            number, few = len(rows) - _CHOSEN, min(len(rows), _CHOSEN)
            # Take long rows while they fit, and then the best subset of the shortest ones.
            long, wanted, before = [], min(high - mean, mean - low - prompt), 0.0
            for row, cost in enumerate(costs[:number].tolist() if number > 0 else ()):
                if before + cost <= wanted:
                    long.append(row)
                    before += cost
            moved = before + _SUBSETS[few] @ costs[-few:]
            highest = np.maximum(high - moved, low + prompt + moved)
            # Neither no rows nor all.
            if not long:
                highest[0] = math.inf
            if len(long) == max(0, number):
                highest[-1] = math.inf
            subset = int(highest.argmin())
            if highest[subset] < best:
                best, which = float(highest[subset]), piece
                taken = np.zeros(len(rows), bool)
                taken[long] = True
                taken[-few:] = _SUBSETS[few][subset]

        def divide() -> None:
            rows, prompt = self._rows[which], self._prompts[which]
            moved = float(own[rows[taken]].sum())
            self._rows[which] = rows[~taken]
            self._rows.append(rows[taken])
            self._prompts.append(prompt)
            self._costs[which] -= moved
            self._costs = np.append(self._costs, prompt + moved)
            self._home = np.append(self._home, idlest)
            load[busiest] -= moved
            load[idlest] += prompt + moved

        return best, divide


def one_per_replica(mesh: Sequence[Coordinates]) -> list[int]:
    """Return the first rank of the last pipeline stage of every data-parallel replica."""
    last = max(c.pp for c in mesh)
    # Only the last stage has outputs, the same on all its tensor-parallel ranks.
    return [rank for rank, c in enumerate(mesh) if c.tp == 0 and c.pp == last]


def one_per_generation_replica(mesh: Sequence[Coordinates]) -> list[int]:
    """Return the first rank of the last pipeline stage of every generation replica."""
    first: dict[tuple[int, int], int] = {}
    for rank, c in sorted(enumerate(mesh), key=lambda entry: (-entry[1].pp, entry[1].tp)):
        first.setdefault((c.dp, c.micro_dp), rank)
    return sorted(first.values())


Dispatch.ONE_TO_ALL = Dispatch(
    "ONE_TO_ALL", lambda rows, mesh: [list(range(len(rows)))] * len(mesh), lambda mesh: [0]
)
Dispatch.SPLIT_BY_DP = Dispatch("SPLIT_BY_DP", _split_by_dp, one_per_replica)
Dispatch.SPLIT_BY_GENERATION_DP = Dispatch(
    "SPLIT_BY_GENERATION_DP", _split_by_generation_dp, one_per_generation_replica
)


# Cost of training on a row: linear in its tokens for matrix products, quadratic for attention.


@dataclass(frozen=True)
class RowCost:
    """Cost of rows in units of a token's linear cost: L + L^2 / A for L tokens (arXiv:2502.21231).

    >>> RowCost(attention_length=1000)(np.array([500, 1000])).tolist()
    [750.0, 2000.0]
    """

    attention_length: float = math.inf
    """A: number of tokens in a row whose attention costs as much as everything else. With infinity,
    attention is free."""

    def __call__(self, num_tokens: np.ndarray) -> np.ndarray:
        tokens = np.asarray(num_tokens, np.float64)
        return tokens * (1 + tokens / self.attention_length)


GAIN = 1 / 16
"""Minimum share of the cost that prompt sharing must save, because it copies the shared tokens."""


def pays(shared: float, alone: float) -> bool:
    """Return whether rows that share prompts cost enough less than rows by themselves."""
    return shared <= (1 - GAIN) * alone


def row_cost_of(model: str | Path) -> RowCost:
    """Return a model's row cost, from the numbers of multiplications that its settings imply. If
    settings are missing, each token costs 1. Attention with a sliding window counts as free."""
    try:
        sizes = Transformer.of(read_model_config(model))
    except ValueError:
        return RowCost()
    linear = sizes.products + sizes.head_products
    full = sum(layer.window is None for layer in sizes.layers)
    # Scores and weighted values each take L / 2 multiplications per token and element of a query.
    return RowCost(linear / (full * sizes.heads * sizes.head_dim)) if full else RowCost()
