"""Shaping of rewards by length, repetition and truncation, and the conversion of response rewards to
token rewards.

Nodes that shape rewards read the column `reward` and write `shaped_reward`. To combine two of them,
let the first write another column, which the second reads:

    samples = penalize_truncated(samples, into="stopped_reward")
    samples = penalize_repetition(samples, reward="stopped_reward")
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..dataflow.batch import Batch, is_ragged
from ..dataflow.column import (
    EPISODE_ID,
    EPISODE_TOKENS,
    FINISH_REASON,
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
from ..dataflow.operation import Shape, node
from .episodes import Episodes
from .kl import AdaptiveCoefficient, k1
from .loss import PackedRows, response_rows
from .turns import Turns

if TYPE_CHECKING:
    from torch import Tensor

Ends: TypeAlias = tuple[float, float]
"""A pair of rewards: for the shortest and the longest response, or the smallest and the largest one."""


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


def cosine_rewards(
    lengths: Tensor, right: Tensor, *, max_tokens: int, of_right: Ends, of_wrong: Ends
) -> Tensor:
    """Return rewards [B] that depend on the length: r_0 for length 0, r_L from the limit on, and
    r_L + (r_0 - r_L) (1 + cos(pi l / L)) / 2 between them (arXiv:2502.03373).

    Args:
        lengths: [B] tokens.
        right: [B] bool: correct responses.
        of_right, of_wrong: (r_0, r_L) of correct, and of other responses.

    >>> lengths, right = torch.tensor([0, 50, 100, 50]), torch.tensor([True, True, True, False])
    >>> cosine_rewards(lengths, right, max_tokens=100, of_right=(1.0, 0.5), of_wrong=(-1.0, -0.5)).tolist()
    [1.0, 0.75, 0.5, -0.75]
    """
    if max_tokens < 1:
        raise UserError(f"cosine_rewards: max_tokens must be at least 1, not {max_tokens}")
    first, last = (
        torch.where(right, good, bad).double() for good, bad in zip(of_right, of_wrong, strict=True)
    )
    progress = (lengths.double() / max_tokens).clamp(max=1)
    return (last + (first - last) * (1 + torch.cos(torch.pi * progress)) / 2).float()


def repetition(tokens: np.ndarray, ngram: int) -> float:
    """Return the share of a response's n-grams that repeat an earlier one: 1 - different / all
    (arXiv:2502.03373, appendix C.2). 0 for fewer than n tokens.

    >>> repetition(np.array([1, 2, 3, 4]), 2), repetition(np.array([5, 5, 5, 5, 5]), 2)
    (0.0, 0.75)
    """
    if ngram < 1:
        raise UserError(f"repetition: ngram must be at least 1, not {ngram}")
    number = len(tokens) - ngram + 1
    if number < 1:
        return 0.0
    found = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(tokens), ngram)
    return 1 - len(np.unique(found, axis=0)) / number


def brevity_rewards(lengths: Tensor, right: Tensor, groups: Tensor) -> Tensor:
    """Return rewards [B] that compare lengths within a group: lambda = 1/2 - (l - min) / (max - min)
    for correct responses, and min(0, lambda) for others (Kimi k1.5, arXiv:2501.12599). 0 in a group
    of equal lengths.

    Args:
        lengths: [B] tokens.
        right: [B] bool: correct responses.
        groups: [B] int64: group index of each response.

    >>> right = torch.tensor([True, True, False, False])
    >>> brevity_rewards(torch.tensor([10, 30, 10, 20]), right, torch.tensor([0, 0, 0, 0])).tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    values = lengths.double()
    number = int(groups.max()) + 1 if len(groups) else 0
    shortest, longest = (
        torch.zeros(number, dtype=torch.float64)
        .scatter_reduce_(0, groups, values, how, include_self=False)
        .index_select(0, groups)
        for how in ("amin", "amax")
    )
    share = 0.5 - (values - shortest) / (longest - shortest)
    found = torch.where(right, share, share.clamp(max=0))
    return torch.where(longest > shortest, found, 0.0).float()


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
    lengths = _lengths(samples, rows)
    penalty = overlong_penalty(lengths, max_tokens=max_tokens, buffer_tokens=buffer_tokens)
    return samples.with_columns(**{into: rows[reward] + factor * penalty})


@node(
    reads=lambda reward: (reward, RESPONSE_IDS),
    may_read=(EPISODE_TOKENS,),
    writes=lambda into: (into,),
)
def reward_by_length(
    samples: Batch,
    *,
    max_tokens: int,
    of_right: Ends = (1.0, 0.5),
    of_wrong: Ends = (-1.0, -0.5),
    above: float = 0.5,
    reward: str = str(REWARD),
    into: str = str(SHAPED_REWARD),
) -> Batch:
    """Replace rewards of 0 and 1 by `cosine_rewards`: short correct responses get more than long
    ones, and long wrong responses lose less than short ones. With the column `episode_tokens`, it
    uses the length of the episode.

    Args:
        max_tokens: longest response that sampling allows.
        of_right, of_wrong: rewards of a correct, and of a wrong response: at length 0, and at
            `max_tokens`.
        above: responses with a higher reward are correct.

    >>> samples = Batch.of(response_ids=[[1, 2], [1, 2, 3, 4], [1, 2]], reward=[1.0, 1.0, 0.0])
    >>> reward_by_length(samples, max_tokens=4)["shaped_reward"].to_pylist()
    [0.75, 0.5, -0.75]
    """
    rows = response_rows(samples, RESPONSE_IDS, reward)
    ends: dict[str, Ends] = {"of_right": of_right, "of_wrong": of_wrong}
    right = rows[reward] > above
    shaped = cosine_rewards(_lengths(samples, rows), right, max_tokens=max_tokens, **ends)
    return samples.with_columns(**{into: shaped})


@node(
    shape=Shape.GROUP,
    reads=lambda reward: (reward, RESPONSE_IDS),
    may_read=(RESPONSE_MASK, EPISODE_ID),
    writes=lambda into: (into,),
)
def reward_brevity(
    samples: Batch,
    *,
    factor: float = 0.5,
    above: float = 0.5,
    reward: str = str(REWARD),
    into: str = str(SHAPED_REWARD),
) -> Batch:
    """Add `factor` times `brevity_rewards`, which compares the trained tokens of an episode with those
    of its group's other episodes. Responses with a reward above `above` are correct.

    >>> samples = Batch.of(group_id=[7, 7], response_ids=[[1], [1, 2, 3]], reward=[1.0, 1.0])
    >>> reward_brevity(samples)["shaped_reward"].to_pylist()
    [1.25, 0.75]
    """
    rows, episodes = response_rows(samples, RESPONSE_IDS, reward), Episodes.of(samples)
    lengths = torch.from_numpy(episodes.sums(rows.trained_lengths.numpy()))
    right = torch.from_numpy(episodes.values(reward)) > above
    found = brevity_rewards(lengths, right, torch.from_numpy(episodes.groups()[1]))
    return samples.with_columns(
        **{into: rows[reward] + factor * torch.from_numpy(episodes.to_rows(found.numpy()))}
    )


@node(
    shape=Shape.GROUP,  # so that all rows of an episode are there
    reads=lambda reward: (reward, RESPONSE_IDS),
    may_read=(RESPONSE_MASK, EPISODE_ID),
    writes=lambda into: (into,),
)
def penalize_repetition(
    samples: Batch,
    *,
    ngram: int = 3,
    factor: float = 1.0,
    reward: str = str(REWARD),
    into: str = str(SHAPED_REWARD),
) -> Batch:
    """Subtract `factor` times the `repetition` of the trained tokens. All rows of an episode lose the
    mean over its rows.

    >>> samples = Batch.of(response_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]], reward=[1.0, 1.0])
    >>> penalize_repetition(samples, ngram=2)["shaped_reward"].to_pylist()
    [1.0, 0.25]
    """
    rows = response_rows(samples, RESPONSE_IDS, reward)
    tokens, trained = rows[RESPONSE_IDS].numpy(), rows.trained.numpy() > 0
    parts = [slice(*ends) for ends in pairwise(rows.cu_seqlens.tolist())]
    found = np.array([repetition(tokens[part][trained[part]], ngram) for part in parts])
    if EPISODE_ID in samples:
        index = samples.groups(EPISODE_ID)[1]
        found = (np.bincount(index, weights=found) / np.bincount(index))[index]
    return samples.with_columns(**{into: rows[reward] - factor * torch.from_numpy(found).float()})


@node(
    shape=Shape.GROUP,
    reads=lambda reward: (reward, FINISH_REASON),
    may_read=(EPISODE_ID,),
    writes=lambda into: (into,),
)
def penalize_truncated(
    samples: Batch, *, keep: float = 0.0, reward: str = str(REWARD), into: str = str(SHAPED_REWARD)
) -> Batch:
    """Multiply the positive rewards of responses that reached the length limit by `keep` (the
    stop-properly penalty of NeMo-RL). If one row of an episode is truncated, all its rows are penalized.

    >>> samples = Batch.of(finish_reason=["length", "stop"], reward=[1.0, 1.0])
    >>> penalize_truncated(samples, keep=0.25)["shaped_reward"].to_pylist()
    [0.25, 1.0]
    """
    rewards = samples.tensor(reward)
    penalized = torch.from_numpy(truncated_rows(samples)) & (rewards > 0)
    return samples.with_columns(**{into: torch.where(penalized, keep * rewards, rewards)})


@node(reads=lambda reward: (reward,), writes=lambda into: (into,))
def rescale_rewards(
    samples: Batch,
    *,
    factor: float = 1.0,
    shift: float = 0.0,
    limits: Ends | None = None,
    reward: str = str(REWARD),
    into: str = str(SHAPED_REWARD),
) -> Batch:
    """Compute factor (r + shift), clipped to `limits`, the smallest and the largest reward.

    >>> samples = Batch.of(reward=[0.0, 1.0, 9.0])
    >>> rescale_rewards(samples, factor=2.0, shift=-0.5, limits=(-1.0, 5.0))["shaped_reward"].to_pylist()
    [-1.0, 1.0, 5.0]
    """
    rewards = factor * (samples.tensor(reward) + shift)
    if limits is not None:
        if not limits[0] <= limits[1]:
            raise UserError(f"rescale_rewards: limits must be (smallest, largest), not {limits}")
        rewards = rewards.clamp(*limits)
    return samples.with_columns(**{into: rewards})


def truncated_rows(samples: Batch) -> np.ndarray:
    """Return which rows reached the length limit, or have an episode with such a row: [rows] bool."""
    truncated = np.array(samples[FINISH_REASON].to_pylist(), dtype=object) == "length"
    if EPISODE_ID in samples:
        index = samples.groups(EPISODE_ID)[1]
        truncated = np.bincount(index, weights=truncated)[index] > 0
    return truncated


def _lengths(samples: Batch, rows: PackedRows) -> Tensor:
    return samples.tensor(EPISODE_TOKENS) if EPISODE_TOKENS in samples else rows.lengths


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
