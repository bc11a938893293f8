"""Advantages with the optimal baseline of each token, within groups.

samples = old_logprobs(samples, actor=actor, collisions=True)
samples = optimal_token_advantages(outcome_rewards(samples))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import (
    ADVANTAGES,
    GROUP_ID,
    LOG_COLLISIONS,
    OLD_LOGPROBS,
    RESPONSE_LOGPROBS,
    RESPONSE_MASK,
    TOKEN_REWARDS,
)
from ..dataflow.lazy import torch
from ..dataflow.operation import Shape, node
from .corrections import TruncatedImportance
from .loss import PackedRows, response_rows
from .values import discounted_returns

if TYPE_CHECKING:
    from torch import Tensor


def score_norms(logprobs: Tensor, log_collisions: Tensor) -> Tensor:
    """Return the squared norm of the gradient of log p_y with respect to the logits, 1 - 2 p_y + sum_v
    p_v^2: [T] float64, 0 for a certain token.

    Args:
        logprobs: [T] nats, log p_y of the sampled tokens.
        log_collisions: [T] nats, log sum_v p_v^2.

    >>> score_norms(torch.tensor([0.5, 1.0]).log(), torch.tensor([0.5, 1.0]).log()).tolist()
    [0.50..., 0.0]
    """
    return (1 - 2 * logprobs.double().exp() + log_collisions.double().exp()).clamp(min=0)


def optimal_baselines(
    returns: Tensor, norms: Tensor, rows: PackedRows, groups: Tensor, *, keeps_tail: bool = False
) -> Tensor:
    """Return the baseline of each token (optimal token baseline: Li et al. 2026, "The Optimal Token
    Baseline: Variance Reduction for Long-Horizon LLM-RL").

    B_t = sum_i W_it G_it / sum_i W_it over the rows i of a group that have a t-th trained token. G is
    the return of the token, and W_it the sum of `norms` up to it. This baseline minimizes the
    variance of the gradient, if the gradients of tokens add up like independent ones.

    Args:
        returns: [T] future rewards; no gradient.
        norms: [T] `score_norms`, possibly times a squared importance weight.
        groups: [B] int64: group index of each row.
        keeps_tail: baseline of tokens after the end of the group's second-longest row: 0 if set;
            otherwise the token's own return, so that its advantage is 0.

    Returns:
        [T] float64; 0 at masked tokens. The plain mean over the rows, if all their W are 0.

    >>> rows = PackedRows.of([2, 1])
    >>> norms = torch.tensor([1.0, 1.0, 3.0])
    >>> optimal_baselines(torch.tensor([1.0, 1.0, 0.0]), norms, rows, torch.tensor([0, 0])).tolist()
    [0.25, 1.0, 0.25]
    """
    trained = np.flatnonzero(rows.trained.numpy() > 0)
    own = rows.row_of_token.numpy()[trained]
    first = np.searchsorted(own, np.arange(len(rows)))  # the first trained token of each row
    place = np.arange(len(trained)) - first[own]
    own_norms = np.split(norms.double().numpy()[trained], first[1:])
    weights = np.concatenate([np.cumsum(each) for each in own_norms])
    key = groups.numpy()[own] * (int(place.max(initial=0)) + 1) + place
    values = returns.double().numpy()[trained]

    def added(of: np.ndarray | None) -> np.ndarray:
        return np.bincount(key, weights=of)[key] if len(key) else np.zeros(0)

    number, total = added(None), added(weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(total == 0, added(values) / number, added(weights * values) / total)
    if keeps_tail:
        found[number == 1] = 0
    out = np.zeros(rows.num_tokens)
    out[trained] = found
    return torch.from_numpy(out)


@node(
    shape=Shape.GROUP,
    reads=lambda importance: (
        *(TOKEN_REWARDS, OLD_LOGPROBS, LOG_COLLISIONS),
        *(() if importance is None else (RESPONSE_LOGPROBS,)),
    ),
    may_read=(RESPONSE_MASK,),
    writes=(ADVANTAGES,),
)
def optimal_token_advantages(
    samples: Batch, *, importance: TruncatedImportance | None = None, keeps_tail: bool = False
) -> Batch:
    """Subtract `optimal_baselines` from the future rewards of each token.

    Only trained tokens count, so given tokens in between (tools) do not shift the places that are
    compared; verl calls this TIR-OTB. Each row is a separate trajectory, also if rows form an
    episode. Rows without a trained token do not count.

    Args:
        importance: the correction of the loss, if it has one; its squared weights then multiply the
            norms.
        keeps_tail: see `optimal_baselines`; verl sets it for TIR-OTB. A row alone in its group has
            its return as the advantage if it is set, otherwise 0.

    >>> samples = Batch.of(
    ...     group_id=[7, 7], token_rewards=[[0.0, 1.0], [0.0]], old_logprobs=[[-0.6931472] * 2, [-0.6931472]],
    ...     log_collisions=[[-0.6931472] * 2, [-0.6931472]])
    >>> optimal_token_advantages(samples)["advantages"].to_pylist()
    [[0.5, 0.0], [-0.5]]
    """
    columns = [] if importance is None else [RESPONSE_LOGPROBS]
    rows = response_rows(samples, TOKEN_REWARDS, OLD_LOGPROBS, LOG_COLLISIONS, *columns)
    returns = discounted_returns(rows[TOKEN_REWARDS], rows)
    norms = rows.only_trained(score_norms(rows[OLD_LOGPROBS], rows[LOG_COLLISIONS]))
    if importance is not None:
        off = rows.only_trained(rows[OLD_LOGPROBS] - rows[RESPONSE_LOGPROBS])
        norms = norms * importance(off, rows)[0].double().square()
    groups = torch.from_numpy(samples.groups(GROUP_ID)[1])
    baselines = optimal_baselines(returns, norms, rows, groups, keeps_tail=keeps_tail)
    advantages = rows.only_trained((returns.double() - baselines).float())
    return samples.with_columns(advantages=(advantages, rows.cu_seqlens))
