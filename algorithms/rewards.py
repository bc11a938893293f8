"""Penalties on rewards, and the conversion of response rewards to token rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..dataflow.batch import Batch, is_ragged
from ..dataflow.column import (
    EPISODE_TOKENS,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_MASK,
    REWARD,
    SHAPED_REWARD,
    TOKEN_REWARDS,
    TURN_ENDS,
)
from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from ..dataflow.operation import node
from .kl import AdaptiveCoefficient, k1
from .loss import PackedRows, response_rows
from .turns import Turns

if TYPE_CHECKING:
    from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Return a penalty for lengths [B] that falls linearly from 0 at the start of the buffer before
    the limit to -1 at the limit (DAPO, arXiv:2503.14476, eq. 13). Raises a UserError unless the
    buffer has 1 to `max_tokens` tokens.

    >>> overlong_penalty(torch.tensor([5, 6, 8, 10, 12]), max_tokens=10, buffer_tokens=4).tolist()
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise UserError(
            f"overlong_penalty: buffer_tokens must be 1 to max_tokens={max_tokens}, not {buffer_tokens}"
        )
    return ((max_tokens - buffer_tokens - lengths) / buffer_tokens).clamp(-1, 0).float()


def penalized_token_rewards(rewards: Tensor, kl: Tensor, rows: PackedRows, coefficient: float) -> Tensor:
    """r_t = -coefficient KL_t, plus the reward of the response at its last trained token (the
    shaped reward of arXiv:1909.08593, §2, eq. 2).

    Args:
        rewards: [B]; no gradient.
        kl: [T] nats per token, such as `k1` of the sampling policy and the reference; no gradient.
        coefficient: reward lost per nat.

    Returns:
        [T] float32; 0 at masked tokens, whatever their `kl` is. The reward of a row without trained
        tokens is dropped.

    >>> rows = PackedRows.of([3, 1], response_mask=[1, 1, 0, 1])
    >>> penalized_token_rewards(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5, 9.0, 0.0]), rows, 0.5).tolist()
    [-0.25, 0.75, 0.0, 2.0]
    """
    return _penalties(kl, rows, coefficient) + _at_last_trained(rewards, rows)


def _penalties(kl: Tensor, rows: PackedRows, coefficient: float) -> Tensor:
    return torch.where(rows.trained > 0, -coefficient * kl, 0.0).float()


def _at_last_trained(rewards: Tensor, rows: PackedRows) -> Tensor:
    """Return each row's reward [B] at its last trained token, 0 elsewhere: [T] float32."""
    trained = rows.trained > 0
    seen = torch.nn.functional.pad(trained.cumsum(0), (1, 0))  # [T + 1] trained tokens before each place
    # The last trained token: the count after it equals the count at the end of its row.
    last = trained & (seen[1:] == rows.per_token(seen[rows.cu_seqlens[1:]]))
    return torch.where(last, rows.per_token(rewards.float()), 0.0)


def _of_tokens(samples: Batch, reward: str, rows: PackedRows) -> Tensor:
    """Return the rewards in a column at the last trained token of their response, or of their turn
    if the column has a reward per turn: [T] float32, 0 elsewhere."""
    if not is_ragged(samples[reward].type):
        return _at_last_trained(samples.tensor(reward), rows)
    turns = Turns.of(samples, rows)
    return torch.from_numpy(turns.at_ends(turns.rewards(samples, reward), rows))


@node(
    reads=lambda reward: (reward, RESPONSE_IDS),
    may_read=(EPISODE_TOKENS,),
    writes=lambda into: (into,),
)
def penalize_overlong(
    samples: Batch,
    *,
    max_tokens: int,
    buffer_tokens: int,
    factor: float = 1.0,
    reward: str = str(REWARD),
    into: str = str(SHAPED_REWARD),
) -> Batch:
    """Subtract `factor` times `overlong_penalty` from the rewards. Use it before
    `group_advantages`. With the column `episode_tokens`, it uses the length of the episode.

    Args:
        max_tokens: longest response, or most sampled tokens of an episode, that sampling allows.
        buffer_tokens: length of the buffer before the limit.
        factor: reward lost at the limit.

    >>> samples = Batch.of(response_ids=[[1, 2], [1, 2, 3, 4]], reward=[1.0, 1.0])
    >>> penalize_overlong(samples, max_tokens=4, buffer_tokens=2)["shaped_reward"].to_pylist()
    [1.0, 0.0]
    """
    rows = response_rows(samples, RESPONSE_IDS, reward)
    lengths = samples.tensor(EPISODE_TOKENS) if EPISODE_TOKENS in samples else rows.lengths
    penalty = overlong_penalty(lengths, max_tokens=max_tokens, buffer_tokens=buffer_tokens)
    return samples.with_columns(**{into: rows[reward] + factor * penalty})


@node(
    reads=lambda reward, old: (reward, old, REFERENCE_LOGPROBS),
    may_read=(RESPONSE_MASK, TURN_ENDS),
    writes=(TOKEN_REWARDS,),
)
def token_rewards(
    samples: Batch,
    *,
    coefficient: float | AdaptiveCoefficient,
    estimator: Callable[..., Any] = k1,
    reward: str = str(REWARD),
    old: str = str(RESPONSE_LOGPROBS),
) -> Batch:
    """Compute token rewards: a KL penalty per trained token, plus the response's reward at its last
    trained token.

    Args:
        coefficient: reward lost per nat.
        estimator: `k1`, `k2`, `k3` or `absolute`.
        reward: column of the rewards; with a reward per turn (`turn_rewards`), each is placed at
            the last trained token of its turn.
        old: column with the log-probabilities of the sampling policy.

    >>> samples = Batch.of(reward=[1.0], response_logprobs=[[-1.0, -1.0]], reference_logprobs=[[-1.5, -1.0]])
    >>> token_rewards(samples, coefficient=0.5)["token_rewards"].to_pylist()
    [[-0.25, 1.0]]
    """
    rows = response_rows(samples, old, REFERENCE_LOGPROBS)
    beta = coefficient.value if isinstance(coefficient, AdaptiveCoefficient) else coefficient
    penalties = _penalties(estimator(rows[old], rows[REFERENCE_LOGPROBS]), rows, beta)
    shaped = penalties + _of_tokens(samples, reward, rows)
    return samples.with_columns(token_rewards=(shaped, rows.cu_seqlens))


@node(
    reads=lambda reward: (reward, RESPONSE_IDS),
    may_read=(RESPONSE_MASK, TURN_ENDS),
    writes=(TOKEN_REWARDS,),
)
def outcome_rewards(samples: Batch, *, reward: str = str(REWARD)) -> Batch:
    """Compute token rewards: the response's reward at its last trained token, 0 elsewhere; with a
    reward per turn (`reward="turn_rewards"`), each at the last trained token of its turn.

    >>> samples = Batch.of(reward=[1.0, 2.0], response_ids=[[5, 6], [7]])
    >>> outcome_rewards(samples)["token_rewards"].to_pylist()
    [[0.0, 1.0], [2.0]]
    """
    rows = response_rows(samples, RESPONSE_IDS)
    return samples.with_columns(token_rewards=(_of_tokens(samples, reward, rows), rows.cu_seqlens))
