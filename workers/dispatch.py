"""Dispatch protocols: how the rows of a call are distributed over a worker group, and whose results are kept.

A protocol is a pair of functions over the mesh coordinates that the ranks registered; the driver needs no
knowledge of tensor or pipeline parallelism. The named protocols are attributes of `Dispatch`; a protocol of one's own is another value:

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
from typing import Any, ClassVar

import numpy as np

from ..dataflow.errors import UserError
from .models.model_folder import head_dim, num_heads, read_model_config, text_settings


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands in its group's mesh. Ranks with equal `dp` are one replica: they get equal rows."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    micro_dp: int = 0
    """Which of the replicas that its training replica becomes for generation, where the same ranks generate with fewer shards and stages
    (HybridFlow's micro-DP groups, arXiv:2409.19256; `generation_coordinates` in `resharding/formulas.py`)."""


@dataclass(frozen=True)
class RowSizes:
    """What a protocol knows of the rows that it distributes; it does not see their contents."""

    num_tokens: np.ndarray
    """[rows] tokens of each row."""
    group_ids: np.ndarray
    """[rows] group of each row."""
    whole_groups: bool = False
    """Rows of one group must stay together."""
    costs: np.ndarray | None = None
    """[rows] what each row costs the rank that gets it (`RowCost`); None: its tokens."""

    def __len__(self) -> int:
        return len(self.num_tokens)


Shares = Sequence[Sequence[int] | None]
"""For each rank the indexes of its rows, or None when the rank is not called."""


@dataclass(frozen=True)
class Dispatch:
    """A dispatch protocol.

    Args:
        name: what messages call it.
        distribute: the rows of a call and the coordinates of the ranks -> the share of each rank.
        collect: the coordinates of the ranks -> the ranks whose results are kept, one for each replica: rows that two of them return
            would be counted twice.
    """

    name: str
    distribute: Callable[[RowSizes, Sequence[Coordinates]], Shares]
    collect: Callable[[Sequence[Coordinates]], list[int]]

    ONE_TO_ALL: ClassVar[Dispatch]
    """Every rank gets the same rows and arguments. Of a call with rows the first rank's result is kept, of others every rank's."""
    SPLIT_BY_DP: ClassVar[Dispatch]
    """Rows are split over data-parallel replicas, balanced by what they cost; equal copies go to the ranks of a replica."""
    SPLIT_BY_GENERATION_DP: ClassVar[Dispatch]
    """Rows are split over the replicas for generation, `micro_dp` of each `dp`; equal copies go to the ranks of one, which hold one model
    together (the pipeline stages and tensor-parallel shards of generation)."""

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"

    def __reduce__(self) -> str | tuple[object, ...]:
        named = getattr(Dispatch, self.name, None)
        return (
            (getattr, (Dispatch, self.name))
            if named is self
            else (Dispatch, (self.name, self.distribute, self.collect))
        )


def balance(sizes: Sequence[float] | np.ndarray, parts: int) -> list[list[int]]:
    """Split indexes so that the sizes of all parts add up to about the same: the largest first, each to the smallest part so far.

    Args:
        sizes: [rows] tokens, or cost, of each row.
        parts: how many parts to make.

    Returns:
        The indexes of each part, in ascending order. Ties go to the lowest part, so that the split is deterministic.

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
        heapq.heapreplace(heap, (load + max(1, size), part))  # rows without tokens are spread by number
    return [part if len(part) < 2 else sorted(part) for part in out]


def _split_by_dp(rows: RowSizes, mesh: Sequence[Coordinates]) -> Shares:
    parts = _split(rows, max(c.dp for c in mesh) + 1)
    return [parts[c.dp] for c in mesh]


def _split_by_generation_dp(rows: RowSizes, mesh: Sequence[Coordinates]) -> Shares:
    replicas = sorted({(c.dp, c.micro_dp) for c in mesh})
    parts = dict(zip(replicas, _split(rows, len(replicas)), strict=True))
    return [parts[c.dp, c.micro_dp] for c in mesh]


def _split(rows: RowSizes, replicas: int) -> list[list[int]]:
    """The rows of each replica, balanced by what they cost."""
    costs = rows.num_tokens if rows.costs is None else rows.costs
    if rows.whole_groups:
        _, index = np.unique(rows.group_ids, return_inverse=True)
        of_groups = np.bincount(index, weights=costs)
        members = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
        return [
            sorted(i for group in part for i in members[group].tolist())
            for part in balance(of_groups, replicas)
        ]
    return balance(costs, replicas)


def one_per_replica(mesh: Sequence[Coordinates]) -> list[int]:
    """The first rank of the last pipeline stage of every data-parallel replica."""
    last = max(c.pp for c in mesh)
    return [rank for rank, c in enumerate(mesh) if c.tp == 0 and c.pp == last]


def one_per_generation_replica(mesh: Sequence[Coordinates]) -> list[int]:
    """Of each replica for generation, the first rank of its last pipeline stage."""
    first: dict[tuple[int, int], int] = {}
    for rank, c in sorted(enumerate(mesh), key=lambda entry: (-entry[1].pp, entry[1].tp)):
        first.setdefault((c.dp, c.micro_dp), rank)
    return sorted(first.values())


def _everything(rows: RowSizes, mesh: Sequence[Coordinates]) -> Shares:
    return [list(range(len(rows))) for _ in mesh]


Dispatch.ONE_TO_ALL = Dispatch("ONE_TO_ALL", _everything, lambda mesh: [0])
Dispatch.SPLIT_BY_DP = Dispatch("SPLIT_BY_DP", _split_by_dp, one_per_replica)
Dispatch.SPLIT_BY_GENERATION_DP = Dispatch(
    "SPLIT_BY_GENERATION_DP", _split_by_generation_dp, one_per_generation_replica
)


# Row cost
#
# What a row costs to train on: linear layers by its tokens, attention by their square.


@dataclass(frozen=True)
class RowCost:
    """Cost of rows in tokens of linear layers: L + L^2 / A for a row of L tokens (ByteScale balances ranks so, arXiv:2502.21231).

    >>> RowCost(attention_length=1000)(np.array([500, 1000])).tolist()
    [750.0, 2000.0]
    """

    attention_length: float = math.inf
    """A: tokens of a row whose attention costs as much as everything else; infinite: a row costs its tokens."""

    def __call__(self, num_tokens: np.ndarray) -> np.ndarray:
        """[rows] tokens -> [rows] float64 cost."""
        tokens = np.asarray(num_tokens, np.float64)
        return tokens * (1 + tokens / self.attention_length)


def row_cost_of(model: str | Path) -> RowCost:
    """The cost of rows of a model, counted from its settings in multiplications: those of a token in linear layers and head, beside
    those with the L / 2 tokens that it attends to on average. Layers with a window count none of the latter. Rows of a model whose
    settings do not say enough cost their tokens.
    """
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
    inner = _active(settings) or inner
    linear = layers * (2 * hidden * (queries + keys) + 3 * hidden * inner) + hidden * vocabulary
    kinds = settings.get("layer_types") or ["full_attention"] * layers
    full = sum(kind == "full_attention" for kind in kinds)
    return RowCost(linear / (full * queries)) if full and queries else RowCost()


def _active(settings: dict[str, Any]) -> int:
    """Width of the experts that a token goes through, of a mixture."""
    each = settings.get("num_experts_per_tok")
    return (
        int(each) * int(settings.get("moe_intermediate_size") or settings["intermediate_size"])
        if each
        else 0
    )
