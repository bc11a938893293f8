"""Reward models, trained on pairs of responses or on labels of a response's steps (process
rewards).

reward_model(preferences, model=critic)                       Bradley-Terry on pairs; critic = group(CriticWorker, head="rewards")
reward_model(preferences, model=critic, loss=RewardLoss(margin="margin"))       with a margin per pair
process_reward_model(responses, model=critic, separator=13)   labels of steps, which end with a token
reward_accuracy(preferences, model=critic)                    an evaluation

A reward model's head outputs one number per response token: the reward of the sequence up to and
including that token. The last number is the reward of the response. A process reward model outputs,
at the end of a step, the logit that the step is correct.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from ..dataflow.batch import Batch
from ..dataflow.column import RESPONSE_IDS, REWARD, STEP_LABELS, TOKEN_REWARDS, TOKEN_SCORES
from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from ..dataflow.metrics import Metrics
from ..dataflow.operation import node
from ..dataflow.tracing import graph
from .loss import FrozenLoss, Loss, PackedRows, observed
from .preference import compare, pairs
from .preference_loss import PairLoss, bradley_terry
from .protocols import Rewarder, Trainable

if TYPE_CHECKING:
    from torch import Tensor


class RewardLoss(PairLoss):
    """A reward model's loss: the mean over pairs of -log sigmoid(r_w - r_l - margin) + centring
    (r_w + r_l)^2, where r_w and r_l are the rewards of the preferred and of the other response.

    The first term is the Bradley-Terry loss (arXiv:2203.02155, eq. 1; with a margin m,
    arXiv:2307.09288, eq. 2). The second term keeps the rewards around 0 (arXiv:2312.09244).

    Pairs are groups of two rows, one of them `preferred`. The reward of a row is the one at its
    last token, masked or not. Pairs do not count if a response has no trained token.

    >>> rows = PackedRows.of([2, 1], group_id=[4, 4], preferred=[1, 0])
    >>> loss_sum, metrics = RewardLoss()(torch.tensor([9.0, 1.0, 1.0]), rows)  # rewards 1 and 1
    >>> round(loss_sum.item(), 4), metrics["preference_accuracy"].value, metrics["chosen_reward"].value
    (0.6931, 0.0, 1.0)
    """

    centring: float = Field(default=0.0, ge=0)
    """[factor] c, the weight of the term that keeps the rewards of a pair around 0. Raise it (0.01
    is common) if rewards drift."""

    def __call__(self, rewards: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """Return the loss before the engine divides it by the count, and means over pairs. Without
        a pair, the loss is 0 with a gradient of 0. `rewards` [T] are the rewards up to each token;
        only the last of each row gets a gradient."""
        chosen, rejected, paired = self._sides(rows)
        # The padding makes the end of a row the index of its last token, even for an empty row.
        last = torch.nn.functional.pad(rewards, (1, 0))[
            rows.cu_seqlens[1:]
        ]  # arbitrary for an empty row
        above, below = (torch.where(paired, last[side], 0.0) for side in (chosen, rejected))
        losses = bradley_terry(above, below, self._margin(rows, chosen))
        losses = losses + self.centring * (above + below).square()
        return torch.where(paired, losses, 0.0).sum(), self._observed(above, below, paired)


class StepLoss(FrozenLoss):
    """A process reward model's loss at the end of each step, the mean over steps: l_t = -y_t log
    sigmoid(r_t) - (1 - y_t) log sigmoid(-r_t), with the step's label y_t (arXiv:2305.20050).

    >>> rows = PackedRows.of([3], step_labels=[float("nan"), 1.0, 0.0])
    >>> loss_sum, metrics = StepLoss()(torch.tensor([9.0, 0.0, 0.0]), rows)
    >>> round(loss_sum.item(), 4), StepLoss().count(rows), metrics["step_reward"].value
    (1.3863, 2.0, 0.5)
    """

    @property
    def reads(self) -> tuple[str, ...]:
        return (str(STEP_LABELS),)

    def count(self, rows: PackedRows) -> float:
        return float(self._ends(rows).sum())

    def __call__(self, rewards: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """Return the loss of logits [T] before the engine divides it by the count, and means over
        steps. Without a step, the loss is 0 with a gradient of 0."""
        ends = self._ends(rows)
        logits = torch.where(ends, rewards, 0.0)
        labels = torch.where(ends, rows[STEP_LABELS].to(rewards.dtype), 0.0)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        watched = {"step_reward": logits.sigmoid(), "step_accuracy": (logits > 0) == (labels > 0.5)}
        return torch.where(ends, losses, 0.0).sum(), observed(ends, watched)

    def _ends(self, rows: PackedRows) -> Tensor:
        """Return which tokens have a label: [T] bool."""
        return (rows.trained > 0) & ~rows[STEP_LABELS].isnan()


@node(reads=lambda labels: (RESPONSE_IDS, labels), writes=(STEP_LABELS,))
def label_steps(rows: Batch, *, separator: int, labels: str = "labels") -> Batch:
    """Add `step_labels`: each step's label at the last token of the step, elsewhere NaN. Raises a
    UserError if a row has more or fewer labels than steps.

    Args:
        separator: token id that ends a step. The last step ends with the response.
        labels: column with a list of labels per row, each from 0 to 1.

    >>> rows = Batch.of(response_ids=[[5, 9, 6, 7]], labels=[[1.0, 0.0]])
    >>> label_steps(rows, separator=9)["step_labels"].to_pylist()
    [[nan, 1.0, nan, 0.0]]
    """
    cu_seqlens = rows.ragged_numpy(RESPONSE_IDS)[1]
    ends = _step_ends(rows, separator)
    given, given_cu_seqlens = rows.ragged_numpy(labels)
    steps = np.diff(np.concatenate([[0], np.cumsum(ends)])[cu_seqlens])
    wrong = np.flatnonzero(steps != np.diff(given_cu_seqlens))
    if len(wrong):
        row = wrong[0]
        raise UserError(
            f"row {row} has {np.diff(given_cu_seqlens)[row]} {labels} and {steps[row]} steps, which end with token "
            f"{separator} or with the response"
        )
    out = np.full(len(ends), np.nan, np.float32)
    out[ends] = given
    return rows.with_columns(step_labels=(out, cu_seqlens))


@node(reads=lambda scores: (RESPONSE_IDS, scores), writes=(TOKEN_REWARDS,))
def step_rewards(samples: Batch, *, separator: int, scores: str = str(TOKEN_SCORES)) -> Batch:
    """Compute token rewards from logits: the probability that a step is correct at its last token,
    elsewhere 0.

    >>> samples = Batch.of(response_ids=[[5, 9, 6]], token_scores=[[7.0, 0.0, 0.0]])
    >>> step_rewards(samples, separator=9)["token_rewards"].to_pylist()
    [[0.0, 0.5, 0.5]]
    """
    logits, cu_seqlens = samples.ragged_numpy(scores)
    right = torch.sigmoid(torch.from_numpy(logits.astype(np.float32))).numpy()
    rewards = np.where(_step_ends(samples, separator), right, np.float32(0))
    return samples.with_columns(token_rewards=(rewards, cu_seqlens))


@graph
def reward_model(preferences: Any, *, model: Trainable, loss: Loss = RewardLoss()) -> Any:
    """Train a reward model on pairs (`prompt_ids`, `chosen_ids`, `rejected_ids`)."""
    return model.update(pairs(preferences), loss=loss)


@graph
def process_reward_model(
    responses: Any, *, model: Trainable, separator: int, labels: str = "labels", loss: Loss = StepLoss()
) -> Any:
    """Train a reward model on step labels (`prompt_ids`, `response_ids`, and a list of labels per
    row)."""
    return model.update(label_steps(responses, separator=separator, labels=labels), loss=loss)


@graph
def reward_accuracy(preferences: Any, *, model: Rewarder) -> Any:
    """Evaluate how often a reward model prefers the preferred response. Metrics:
    `preference_accuracy` and `preference_margin`."""
    return compare(model.score(pairs(preferences)), score=str(REWARD))


def _step_ends(rows: Batch, separator: int) -> np.ndarray:
    """Return which tokens end a step: [T] bool."""
    ids, cu_seqlens = rows.ragged_numpy(RESPONSE_IDS)
    ends = ids == separator
    # The last token ends a step even if it is not the separator; an empty row has none.
    ends[cu_seqlens[1:][np.diff(cu_seqlens) > 0] - 1] = True
    return ends
