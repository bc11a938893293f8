"""Aggregation of per-token losses to one number: sum_t w_t l_t / sum of counts. The result does not
depend on microbatches or ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..dataflow.errors import UserError
from .loss import FrozenLoss, PackedRows

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Aggregation(Protocol):
    def weights(self, rows: PackedRows) -> Tensor:
        """Return the token weights: [T] float32, 0 for masked tokens."""
        ...

    def count(self, rows: PackedRows) -> float:
        """Return the count of these rows; the engine adds the counts of a step."""
        ...


@dataclass(frozen=True)
class TokenMean:
    def weights(self, rows: PackedRows) -> Tensor:
        return rows.trained

    def count(self, rows: PackedRows) -> float:
        return float(rows.trained.sum())


@dataclass(frozen=True)
class SequenceMean:
    """Mean over responses of the mean over their trained tokens (GRPO, arXiv:2402.03300, eq. 3).
    Rows without a trained token do not count.

    >>> rows = PackedRows.of([2, 1, 1], response_mask=[1, 1, 1, 0])
    >>> sequence_mean.weights(rows).tolist(), sequence_mean.count(rows)
    ([0.5, 0.5, 1.0, 0.0], 2.0)
    """

    def weights(self, rows: PackedRows) -> Tensor:
        # Avoid 0 / 0 in a row without a trained token.
        return rows.trained / rows.per_token(rows.trained_lengths.clamp(min=1))

    def count(self, rows: PackedRows) -> float:
        return float(rows.counted.sum())


@dataclass(frozen=True)
class FixedLength:
    """Sum over each response's trained tokens, divided by a constant length (Dr. GRPO,
    arXiv:2503.20783, §3.1). Unlike `SequenceMean`, it does not favor short correct and long wrong
    responses. Rows without a trained token do not count.

    >>> FixedLength(8).weights(PackedRows.of([2])).tolist(), FixedLength(8).count(PackedRows.of([2]))
    ([0.125, 0.125], 1.0)
    """

    max_tokens: int
    """[tokens] The constant length, usually the maximum length of a response."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"FixedLength.max_tokens must be at least 1, not {self.max_tokens}")

    def weights(self, rows: PackedRows) -> Tensor:
        return rows.trained / self.max_tokens

    def count(self, rows: PackedRows) -> float:
        return float(rows.counted.sum())


token_mean = TokenMean()
sequence_mean = SequenceMean()
fixed_length = FixedLength


class AggregatedLoss(FrozenLoss):
    """A per-token loss with an aggregation."""

    aggregation: Aggregation = token_mean
    """Aggregation of token losses: `token_mean`, `sequence_mean` or `fixed_length(max_tokens)`.
    Choose `sequence_mean` to weight all responses equally instead of all tokens."""

    def count(self, rows: PackedRows) -> float:
        return self.aggregation.count(rows)
