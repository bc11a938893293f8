"""Reward models: learned from pairs of responses, or from labels of the steps of a response (process rewards).

reward_model(preferences, model=critic)                       Bradley-Terry on pairs; critic = group(CriticWorker, head="rewards")
reward_model(preferences, model=critic, loss=RewardLoss(margin="margin"))       with a margin that each pair says
process_reward_model(responses, model=critic, separator=13)   labels of steps, which end with a token
reward_accuracy(preferences, model=critic)                    an evaluation

A reward model's head says one number for each response token: the reward of the sequence up to it, with it. The last is that of the
response, and those at the ends of its steps are logits of these being right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from ..dataflow.batch import Batch
from ..dataflow.column import (
    RESPONSE_IDS,
    REWARD,
    STEP_LABELS,
    TOKEN_REWARDS,
    TOKEN_SCORES,
)
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
    """A reward model's loss on pairs: l = -log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2, the mean over pairs.

    The first term is Bradley-Terry's (arXiv:2203.02155, eq. 1; with a margin arXiv:2307.09288, eq. 2), which only differences
    enter. The second, if any, keeps the rewards around 0 (arXiv:2312.09244). The pairs are the groups of the rows: two rows each,
    one of them `preferred`. A reward is that of the last token, masked or not; a pair of which a response has no trained token is
    left out, and not counted.

    >>> rows = PackedRows.of([2, 1], group_id=[4, 4], preferred=[1, 0])
    >>> loss_sum, metrics = RewardLoss()(torch.tensor([9.0, 1.0, 1.0]), rows)  # rewards 1 and 1
    >>> round(loss_sum.item(), 4), metrics["preference_accuracy"].value, metrics["chosen_reward"].value
    (0.6931, 0.0, 1.0)
    """

    margin: float | str = 0.0
    """[reward] How far the preferred response is to be ahead; or the column that says it of each pair (its two rows say the same). Give
    the column where annotators said how much better a response is."""
    centring: float = Field(default=0.0, ge=0)
    """[factor] c: keeps the rewards of a pair around 0. Raise it (0.01 is common) where rewards drift."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, *((self.margin,) if isinstance(self.margin, str) else ()))

    def __call__(self, rewards: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """The undivided loss, and its metrics.

        Args:
            rewards: [T] of each token, that of the sequence up to it; gradient flows, from the last of each row.
            rows: with the columns of `reads`, none of which gets a gradient.

        Returns:
            (scalar, metrics). 0 with a gradient of 0 without a pair. Means over pairs: `chosen_reward`, `rejected_reward`,
            `reward_margin` (their difference) and `preference_accuracy` (how often that is above 0).
        """
        chosen, rejected, paired = self._sides(rows)
        last = torch.nn.functional.pad(rewards, (1, 0))[rows.cu_seqlens[1:]]  # of an empty row anything
        above, below = (torch.where(paired, last[side], 0.0) for side in (chosen, rejected))
        margin = rows[self.margin][chosen] if isinstance(self.margin, str) else self.margin
        losses = bradley_terry(above, below, margin) + self.centring * (above + below).square()
        return torch.where(paired, losses, 0.0).sum(), self._observed(above, below, paired)


class StepLoss(FrozenLoss):
    """A process reward model's loss: l_t = -y_t log sigmoid(r_t) - (1 - y_t) log sigmoid(-r_t) at the end of each step
    (arXiv:2305.20050), the mean over steps; y_t is the step's label.

    >>> rows = PackedRows.of([3], step_labels=[float("nan"), 1.0, 0.0])
    >>> loss_sum, metrics = StepLoss()(torch.tensor([9.0, 0.0, 0.0]), rows)
    >>> round(loss_sum.item(), 4), StepLoss().count(rows), metrics["step_reward"].value
    (1.3863, 2.0, 0.5)
    """

    @property
    def reads(self) -> tuple[str, ...]:
        return (str(STEP_LABELS),)

    def count(self, rows: PackedRows) -> float:
        """Steps that end with a trained token."""
        return float(self._ends(rows).sum())

    def __call__(self, rewards: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """The undivided loss, and its metrics.

        Args:
            rewards: [T] logits; gradient flows.
            rows: with `step_labels`, which get no gradient.

        Returns:
            (scalar, metrics). 0 with a gradient of 0 without a step. Means over steps: `step_reward` (the probability of being
            right) and `step_accuracy` (probability and label are on the same side of a half).
        """
        ends = self._ends(rows)
        logits, labels = (
            torch.where(ends, values, 0.0) for values in (rewards, rows[STEP_LABELS].to(rewards.dtype))
        )
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        watched = {"step_reward": logits.sigmoid(), "step_accuracy": (logits > 0) == (labels > 0.5)}
        return torch.where(ends, losses, 0.0).sum(), observed(ends, watched)

    def _ends(self, rows: PackedRows) -> Tensor:
        """[T] bool."""
        return (rows.trained > 0) & ~rows[STEP_LABELS].isnan()


@node(reads=lambda labels: (RESPONSE_IDS, labels), writes=(STEP_LABELS,))
def label_steps(rows: Batch, *, separator: int, labels: str = "labels") -> Batch:
    """The labels of the steps of each response at the last tokens of these.

    Args:
        rows: any rows.
        separator: the token id that ends a step; the last step ends with the response, whatever its last token is.
        labels: the column with a list of labels for each row, 0 to 1.

    Raises:
        UserError: a row has another number of labels than of steps.

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
        raise UserError(
            f"row {wrong[0]} has {np.diff(given_cu_seqlens)[wrong[0]]} {labels} and {steps[wrong[0]]} steps, which end with token "
            f"{separator} or with the response"
        )
    out = np.full(len(ends), np.nan, np.float32)
    out[ends] = given
    return rows.with_columns(step_labels=(out, cu_seqlens))


@node(reads=lambda scores: (RESPONSE_IDS, scores), writes=(TOKEN_REWARDS,))
def step_rewards(samples: Batch, *, separator: int, scores: str = str(TOKEN_SCORES)) -> Batch:
    """A process reward model's rewards: at the last token of each step the probability that it is right, 0 at the others.

    Args:
        samples: any rows.
        separator: as for `label_steps`.
        scores: the column with the model's logits.

    >>> samples = Batch.of(response_ids=[[5, 9, 6]], token_scores=[[7.0, 0.0, 0.0]])
    >>> step_rewards(samples, separator=9)["token_rewards"].to_pylist()
    [[0.0, 0.5, 0.5]]
    """
    logits, cu_seqlens = samples.ragged_numpy(scores)
    right = torch.sigmoid(torch.from_numpy(logits.astype(np.float32))).numpy()
    return samples.with_columns(
        token_rewards=(np.where(_step_ends(samples, separator), right, np.float32(0)), cu_seqlens)
    )


@graph
def reward_model(preferences: Any, *, model: Trainable, loss: Loss = RewardLoss()) -> Any:
    """Train a reward model on given pairs (`prompt_ids`, `chosen_ids`, `rejected_ids`, and the column of a margin)."""
    return model.update(pairs(preferences), loss=loss)


@graph
def process_reward_model(
    responses: Any, *, model: Trainable, separator: int, labels: str = "labels", loss: Loss = StepLoss()
) -> Any:
    """Train a reward model on labels of steps (`prompt_ids`, `response_ids`, and a column with a list of labels for each row)."""
    return model.update(label_steps(responses, separator=separator, labels=labels), loss=loss)


@graph
def reward_accuracy(preferences: Any, *, model: Rewarder) -> Any:
    """An evaluation: how often a reward model gives the preferred response the higher reward. Its metrics are
    `preference_accuracy` and `preference_margin`."""
    return compare(model.score(pairs(preferences)), score=str(REWARD))


def _step_ends(rows: Batch, separator: int) -> np.ndarray:
    """[T] bool: tokens that end a step."""
    ids, cu_seqlens = rows.ragged_numpy(RESPONSE_IDS)
    ends = ids == separator
    ends[cu_seqlens[1:][np.diff(cu_seqlens) > 0] - 1] = True
    return ends
