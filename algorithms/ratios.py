"""Importance ratios between the policy and the one before the update, of tokens and of whole responses.

The gaps between two engines, of some hundredths of a nat a token, add up in the ratio of a response. `PolicyLoss` therefore compares
whole responses with the trainer's own log-probabilities and never with the generator's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

    >>> import torch
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

    >>> import torch
    >>> sequence_ratio(torch.tensor([0.5, -0.25, 1.0]), PackedRows.of([2, 1])).tolist()
    [0.125, 0.125, 1.0]
    """
    means_B = rows.sums(log_ratio * rows.trained) / rows.trained_lengths.clamp(min=1)
    return rows.per_token(means_B)


def sequence_product(log_ratio: Tensor, rows: PackedRows) -> Tensor:
    """The ratio of whole responses, prod_t r_t, at each of their tokens (RLOO, arXiv:2402.14740, which acts by the response).

    Args:
        log_ratio: [T] log p - log q; gradient flows.
        rows: the rows that the tokens belong to; masked tokens stay out of the product.

    Returns:
        [T] log-ratio, equal over the tokens of a row; 0 for a row with every token masked.

    >>> import torch
    >>> sequence_product(torch.tensor([0.5, -0.25, 1.0]), PackedRows.of([2, 1])).tolist()
    [0.25, 0.25, 1.0]
    """
    return rows.per_token(rows.sums(log_ratio * rows.trained))
