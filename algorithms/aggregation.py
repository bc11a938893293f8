"""Aggregation of per-token losses to one number: sum_t w_t l_t / sum of counts. The result does not
depend on microbatches or ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from ..dataflow.column import EPISODE_TOKENS
from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from .loss import FrozenLoss, PackedRows

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Aggregation(Protocol):
    """Weights of tokens. An attribute `may_read` names columns that the aggregation uses if they
    exist."""

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
class EpisodeMean:
    """Mean over episodes of the mean over the trained tokens of all their rows. Without the column
    `episode_tokens`, each row is an episode, as in `SequenceMean`.

    A row counts as its share of its episode's tokens, so the rows of an episode may be in different
    microbatches and on different ranks. If rows of an episode are missing or masked, the episode
    counts as the share that is left.

    >>> rows = PackedRows.of([1, 3, 2], episode_tokens=[4, 4, 2])  # two rows of one episode, and another
    >>> episode_mean.weights(rows).tolist(), episode_mean.count(rows)
    ([0.25, 0.25, 0.25, 0.25, 0.5, 0.5], 2.0)
    """

    may_read: ClassVar[tuple[str, ...]] = (str(EPISODE_TOKENS),)

    def weights(self, rows: PackedRows) -> Tensor:
        return rows.trained / rows.per_token(self._tokens(rows))

    def count(self, rows: PackedRows) -> float:
        # In float64, because the counts of many rows must add up to a number of episodes.
        return float((rows.trained_lengths.double() / self._tokens(rows).double()).sum())

    def _tokens(self, rows: PackedRows) -> Tensor:
        """Return the trained tokens of each row's episode: [B] float32, at least 1."""
        if EPISODE_TOKENS not in rows:
            return rows.trained_lengths.clamp(min=1)
        return rows[EPISODE_TOKENS].to(torch.float32).clamp(min=1)


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
episode_mean = EpisodeMean()
fixed_length = FixedLength


class AggregatedLoss(FrozenLoss):
    """A per-token loss with an aggregation."""

    aggregation: Aggregation = token_mean
    """Aggregation of token losses: `token_mean`, `sequence_mean`, `episode_mean` or
    `fixed_length(max_tokens)`. Choose `sequence_mean` to weight all responses equally instead of
    all tokens, or `episode_mean` to weight all episodes of a harness equally."""

    @property
    def may_read(self) -> tuple[str, ...]:
        return (*super().may_read, *getattr(self.aggregation, "may_read", ()))

    def count(self, rows: PackedRows) -> float:
        return self.aggregation.count(rows)
