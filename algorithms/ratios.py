"""Importance ratios between the policy and the one that sampled, and the clipped surrogate that bounds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dataflow.lazy import torch
from .loss import PackedRows

if TYPE_CHECKING:
    from torch import Tensor


def token_ratio(log_ratio: Tensor, rows: PackedRows) -> Tensor:
    """Each token's own ratio r_t = p(y_t) / p_old(y_t), as in PPO (arXiv:1707.06347, §3): the log-ratio as it is.

    Args:
        log_ratio: [T] log p - log p_old; gradient flows.
        rows: the rows that the tokens belong to.

    Returns:
        [T] log-ratio.

    >>> token_ratio(torch.tensor([0.5, -0.5]), PackedRows.of([2])).tolist()
    [0.5, -0.5]
    """
    return log_ratio


def sequence_ratio(log_ratio: Tensor, rows: PackedRows) -> Tensor:
    """The response's length-normalised ratio s = exp(mean_t log r_t), at each of its tokens (GSPO, arXiv:2507.18071, eq. 7).

    With `sequence_mean` and an advantage that is the same over the response, the clipped surrogate is GSPO's objective
    (eq. 5), gradient included.

    Args:
        log_ratio: [T] log p - log p_old; gradient flows.
        rows: the rows that the tokens belong to; masked tokens stay out of the mean.

    Returns:
        [T] log-ratio, equal over the tokens of a row; 0 for a row with every token masked.

    >>> sequence_ratio(torch.tensor([0.5, -0.25, 1.0]), PackedRows.of([2, 1])).tolist()
    [0.125, 0.125, 1.0]
    """
    means_B = rows.sums(log_ratio * rows.trained) / rows.trained_lengths.clamp(min=1)
    return rows.per_token(means_B)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Clipped policy objective, as a loss: -min(r A, clip(r, 1 - low, 1 + high) A).

    PPO (arXiv:1707.06347, eq. 7) with equal bounds; DAPO's clip-higher (arXiv:2503.14476, eq. 10) with high > low.

    Args:
        ratio: [T] p / p_old; gradient flows.
        advantages: [T]; no gradient.
        clip_low: how far below 1 the ratio earns.
        clip_high: how far above 1.

    Returns:
        ([T] loss, [T] bool: the clipped value was taken, so that the token has no gradient).

    >>> loss, clipped = clipped_surrogate(torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0]), 0.2, 0.25)
    >>> loss.tolist(), clipped.tolist()
    ([-1.25, 1.5, 0.800000...], [True, False, True])
    """
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.maximum(plain, bounded), bounded > plain
