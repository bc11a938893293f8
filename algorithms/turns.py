"""Credit for turns: each sampled turn of a response is one step.

critic_turn_advantages(samples)        generalized advantages over turns, with a critic
group_turn_advantages(samples)         each turn against the same turn of the group's other episodes

A turn's tokens are the trained tokens between the end of the turn before and its own end. The tokens
in between that tools, users or templates gave are masked: they have no advantage and no target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import (
    ADVANTAGES,
    EPISODE_ID,
    RESPONSE_IDS,
    RESPONSE_MASK,
    RETURNS,
    REWARD,
    SAMPLE_ID,
    TOKEN_REWARDS,
    TURN_ENDS,
    TURN_REWARDS,
    VALUES,
)
from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from ..dataflow.operation import Shape, node
from .advantages import Estimator, Outcomes, episode_advantages, group_normalized
from .episodes import Episodes, row_name
from .loss import PackedRows, response_rows
from .values import critic_advantages, discounted_returns, generalized_advantages, whitened


@dataclass(frozen=True)
class Turns:
    """The K sampled turns of B packed rows, in the order of their tokens."""

    cu_turns: np.ndarray
    """[B + 1]; row i has the turns `cu_turns[i]:cu_turns[i + 1]`."""
    row_of_turn: np.ndarray
    """[K] int64: index of each turn's row."""
    ends: np.ndarray
    """[K] int64: place after the turn's last token, among the tokens of all rows."""
    trained: np.ndarray
    """[N] int64: places of the trained tokens, among the tokens of all rows."""
    turn_of_trained: np.ndarray
    """[N] int64: index of each trained token's turn."""

    @classmethod
    def of(cls, samples: Batch, rows: PackedRows) -> Turns:
        """Read `turn_ends`. Raises a UserError if a row's ends are not in ascending order, are not
        in its response, or if trained tokens follow the last one.

        >>> samples = Batch.of(response_ids=[[5, 6, 9, 7]], response_mask=[[1, 1, 0, 1]], turn_ends=[[2, 4]])
        >>> Turns.of(samples, response_rows(samples, "response_ids")).turn_of_trained.tolist()
        [0, 0, 1]
        """
        within, cu_turns = samples.ragged_numpy(TURN_ENDS)
        starts = rows.cu_seqlens.numpy()
        row_of_turn = np.repeat(np.arange(len(rows)), np.diff(cu_turns))
        ends = starts[row_of_turn] + within
        same_row = np.diff(row_of_turn, prepend=-1) == 0
        before = np.where(same_row, np.concatenate([[0], ends[:-1]]), starts[row_of_turn])
        wrong = row_of_turn[(ends < before) | (ends > starts[row_of_turn + 1])]
        trained = np.flatnonzero(rows.trained.numpy() > 0)
        turn_of_trained = np.searchsorted(ends, trained, side="right")
        row_of_trained = np.searchsorted(starts, trained, side="right") - 1
        # A token after the last turn of its row finds a later row's turn, or none.
        found = np.append(row_of_turn, -1)[turn_of_trained]
        for row in [*wrong[:1], *row_of_trained[found != row_of_trained][:1]]:
            raise UserError(
                f"{row_name(samples, row)} has turn_ends {within[cu_turns[row] : cu_turns[row + 1]].tolist()} and a response of "
                f"{starts[row + 1] - starts[row]} tokens; the ends must ascend up to the response's length, and no "
                "trained token may follow the last one"
            )
        return cls(cu_turns, row_of_turn, ends, trained, turn_of_trained)

    def rewards(self, samples: Batch, column: object) -> np.ndarray:
        """Return a column with one reward per turn, `[K]` float32. Raises a UserError if a row has
        more or fewer rewards than turns."""
        rewards, cu_rewards = samples.ragged_numpy(column)
        wrong = np.flatnonzero(np.diff(cu_rewards) != np.diff(self.cu_turns))
        if len(wrong):
            row = wrong[0]
            raise UserError(
                f"{row_name(samples, row)} has {np.diff(cu_rewards)[row]} {column} and {np.diff(self.cu_turns)[row]} turns; the "
                "harness must return one reward per sampled turn"
            )
        return rewards

    def at_ends(self, rewards: np.ndarray, rows: PackedRows) -> np.ndarray:
        """Return the rewards [K] at the last trained token before each turn's end, elsewhere 0:
        `[T]` float32. Rewards of turns without such a token in their row are dropped."""
        last = np.searchsorted(self.trained, self.ends) - 1
        has_one = np.append(self.trained, -1)[last] >= rows.cu_seqlens.numpy()[self.row_of_turn]
        places = self.trained[last[has_one]]
        return np.bincount(places, rewards[has_one], minlength=rows.num_tokens).astype(np.float32)


@node(
    reads=(TOKEN_REWARDS, VALUES),
    may_read=(RESPONSE_MASK, TURN_ENDS),
    writes=(ADVANTAGES, RETURNS),
)
def critic_turn_advantages(
    samples: Batch, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True
) -> Batch:
    """Generalized advantages (arXiv:1506.02438, eq. 16) with turns as steps, as in Turn-PPO
    (arXiv:2512.17008). Without the column `turn_ends`, the steps are tokens, as in
    `critic_advantages`.

    A_k = delta_k + gamma lam A_k+1, where delta_k = r_k + gamma V_k+1 - V_k. r_k is the sum of the
    token rewards of turn k, and V_k the critic's prediction before its first token. After the last
    turn of a row, V and A are 0. All trained tokens of the turn get A_k and the return A_k + V_k,
    which does not depend on V_k, and so is a target for each of them.

    Args:
        gamma: discount per turn, 0 to 1 (otherwise a UserError, as for `lam`).
        whiten: see `critic_advantages`.

    >>> samples = Batch.of(
    ...     token_rewards=[[0.0, 0.0, 9.0, 1.0]],
    ...     values=[[0.5, 7.0, 9.0, 0.25]],
    ...     response_mask=[[1, 1, 0, 1]],
    ...     turn_ends=[[2, 4]],
    ... )
    >>> critic_turn_advantages(samples, lam=0.0, whiten=False).select(("advantages", "returns")).to_rows()
    [{'advantages': [-0.25, -0.25, 0.0, 0.75], 'returns': [0.25, 0.25, 0.0, 1.0]}]
    """
    if TURN_ENDS not in samples:
        return critic_advantages(samples, gamma=gamma, lam=lam, whiten=whiten)
    rows = response_rows(samples, TOKEN_REWARDS, VALUES)
    turns = Turns.of(samples, rows)
    # Skip turns without a trained token.
    steps, first, step_of_trained = np.unique(
        turns.turn_of_trained, return_index=True, return_inverse=True
    )
    rewards = np.bincount(step_of_trained, weights=rows[TOKEN_REWARDS].numpy()[turns.trained])
    made = generalized_advantages(
        torch.from_numpy(rewards.astype(np.float32)),
        torch.from_numpy(rows[VALUES].numpy()[turns.trained[first]]),
        PackedRows.of(np.bincount(turns.row_of_turn[steps], minlength=len(rows))),
        gamma=gamma,
        lam=lam,
    )
    out = np.zeros((2, rows.num_tokens), dtype=np.float32)
    for of_tokens, of_steps in zip(out, made, strict=True):
        of_tokens[turns.trained] = of_steps.numpy()[step_of_trained]
    advantages, returns = map(torch.from_numpy, out)
    advantages = whitened(advantages, rows) if whiten else advantages
    cu_seqlens = rows.cu_seqlens
    return samples.with_columns(advantages=(advantages, cu_seqlens), returns=(returns, cu_seqlens))


@node(
    shape=Shape.GROUP,
    reads=lambda reward: (reward, RESPONSE_IDS, TURN_ENDS, TURN_REWARDS),
    may_read=(RESPONSE_MASK, EPISODE_ID),
    writes=(ADVANTAGES,),
)
def group_turn_advantages(
    samples: Batch,
    *,
    estimator: Estimator = group_normalized,
    gamma: float = 1.0,
    turn_weight: float = 1.0,
    reward: str = str(REWARD),
    whiten: bool = False,
) -> Batch:
    """Advantages of turns: A = A_E + turn_weight A_S, as in GiGPO (arXiv:2505.10978).

    A_E compares the episode's reward with its group's rewards, as in `group_advantages`. A_S
    compares the turn's return, R_k = sum_{j >= k} gamma^(j - k) r_j over the `turn_rewards` of its
    episode, with the returns of the same turn (the k-th) of the group's other episodes. GiGPO
    compares turns that start in the same state of the environment instead.

    If an episode has several rows, its turns are numbered through them in the order of their sample
    ids. The masks of `group_advantages` apply, and a turn without a trained token does not vote.

    Args:
        samples: whole groups.
        estimator: a function of rewards, groups and lengths, for both terms.
        gamma: discount per turn, 0 to 1 (otherwise a UserError).
        turn_weight: weight of A_S.
        whiten: see `group_advantages`.

    >>> from .advantages import group_centred
    >>> samples = Batch.of(
    ...     group_id=[7, 7],
    ...     reward=[1.0, 0.0],
    ...     response_ids=[[5, 9, 6], [8]],
    ...     response_mask=[[1, 0, 1], [1]],
    ...     turn_ends=[[1, 3], [1]],
    ...     turn_rewards=[[0.5, 1.0], [0.5]],
    ... )
    >>> group_turn_advantages(samples, estimator=group_centred)["advantages"].to_pylist()
    [[1.0, 0.0, 0.5], [-1.0]]
    """
    if columns := getattr(estimator, "reads", ()):
        raise UserError(
            f"group_turn_advantages: the estimator reads {', '.join(columns)}, which has no values of turns; take one "
            "that compares the rewards of a group, such as group_normalized"
        )
    rows = response_rows(samples, RESPONSE_IDS)
    turns, episodes = Turns.of(samples, rows), Episodes.of(samples)
    rewards = turns.rewards(samples, TURN_REWARDS)
    ids = samples.numpy(SAMPLE_ID) if SAMPLE_ID in samples else np.arange(len(rows))
    # Lay out the turns of each episode in its order, without episodes that do not vote.
    episode = episodes.of_row[turns.row_of_turn]
    order = np.lexsort((np.arange(len(episode)), ids[turns.row_of_turn], episode))
    order = order[episode[order] >= 0]
    episode = episode[order]
    laid_out = PackedRows.of(np.bincount(episode, minlength=len(episodes)))
    returns = discounted_returns(torch.from_numpy(rewards[order]), laid_out, gamma=gamma)
    number = np.arange(len(order)) - laid_out.cu_seqlens.numpy()[episode]
    tokens = np.bincount(turns.turn_of_trained, minlength=len(rewards))[order]
    voting = np.flatnonzero(tokens)
    # Turns with equal group and number form one group of the estimator.
    keys = episodes.groups()[1][episode] * (number.max(initial=0) + 1) + number
    index = np.unique(keys[voting], return_inverse=True)[1]
    outcomes = Outcomes(
        returns[torch.from_numpy(voting)], torch.from_numpy(index), torch.from_numpy(tokens[voting])
    )
    of_turn = np.zeros(len(rewards))
    of_turn[order[voting]] = estimator(outcomes).numpy()
    of_row = episode_advantages(episodes, rows, estimator, reward).numpy()
    advantages = np.zeros(rows.num_tokens, dtype=np.float32)
    its_turn = turns.turn_of_trained
    advantages[turns.trained] = of_row[turns.row_of_turn[its_turn]] + turn_weight * of_turn[its_turn]
    advantages_T = torch.from_numpy(advantages)
    if whiten:
        advantages_T = whitened(advantages_T, rows)
    return samples.with_columns(advantages=(advantages_T, rows.cu_seqlens))
