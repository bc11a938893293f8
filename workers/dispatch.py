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

from ..dataflow.errors import UserError
from .models.model_folder import head_dim, num_heads, read_model_config, text_settings


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
    """[rows] cost of computing each row (`RowCost`). Default: its number of tokens."""

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
    rows."""
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
    heap = [(0, part) for part in range(parts)]
    out: list[list[int]] = [[] for _ in range(parts)]
    tokens = np.asarray(sizes)
    order = np.argsort(-tokens, kind="stable")
    for index, size in zip(order.tolist(), tokens[order].tolist(), strict=True):
        load, part = heap[0]
        out[part].append(index)
        heapq.heapreplace(heap, (load + max(1, size), part))
    return [part if len(part) < 2 else sorted(part) for part in out]


def _split_by_dp(rows: RowSizes, mesh: Sequence[Coordinates]) -> Shares:
    parts = _split(rows, max(c.dp for c in mesh) + 1)
    return [parts[c.dp] for c in mesh]


def _split_by_generation_dp(rows: RowSizes, mesh: Sequence[Coordinates]) -> Shares:
    replicas = sorted({(c.dp, c.micro_dp) for c in mesh})
    parts = dict(zip(replicas, _split(rows, len(replicas)), strict=True))
    return [parts[c.dp, c.micro_dp] for c in mesh]


def _split(rows: RowSizes, replicas: int) -> list[list[int]]:
    costs = rows.num_tokens if rows.costs is None else rows.costs
    if rows.whole_groups:
        _, index = np.unique(rows.group_ids, return_inverse=True)
        of_groups = np.bincount(index, weights=costs)
        members = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
        parts = balance(of_groups, replicas)
        return [sorted(i for group in part for i in members[group].tolist()) for part in parts]
    return balance(costs, replicas)


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


def row_cost_of(model: str | Path) -> RowCost:
    """Return a model's row cost, from the numbers of multiplications that its settings imply. If
    settings are missing, each token costs 1. Attention with a sliding window counts as free."""
    try:
        settings = text_settings(read_model_config(model))
    except UserError:
        return RowCost()
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
    if any(not isinstance(settings.get(name), int) for name in names):
        return RowCost()
    hidden, layers, vocabulary, inner = (int(settings[name]) for name in names)
    heads, of_head = num_heads(settings) or 0, head_dim(settings) or 0
    queries, keys = heads * of_head, int(settings.get("num_key_value_heads") or heads) * of_head
    if chosen := settings.get("num_experts_per_tok"):  # a mixture of experts computes only these
        inner = int(chosen) * int(settings.get("moe_intermediate_size") or inner)
    # Projections of queries, keys, values and outputs; three matrices of the MLP; the head.
    linear = layers * (2 * hidden * (queries + keys) + 3 * hidden * inner) + hidden * vocabulary
    kinds = settings.get("layer_types") or ["full_attention"] * layers
    full = sum(kind == "full_attention" for kind in kinds)
    # Scores and weighted values each take L / 2 * queries multiplications per token and layer.
    return RowCost(linear / (full * queries)) if full and queries else RowCost()
