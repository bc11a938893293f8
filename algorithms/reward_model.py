"""Reward models: learned from pairs of responses.

reward_model(preferences, model=critic)                       Bradley-Terry on pairs; critic = group(CriticWorker, head="rewards")
reward_model(preferences, model=critic, loss=RewardLoss(margin="margin"))       with a margin that each pair says
reward_accuracy(preferences, model=critic)                    an evaluation

A reward model's head says one number for each response token: the reward of the sequence up to it, with it. The last is that of the
response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from ..dataflow.column import GROUP_ID, PREFERRED, RESPONSE_MASK, REWARD
from ..dataflow.config import Config
from ..dataflow.graph import graph
from ..dataflow.lazy import torch
from ..dataflow.metrics import Mean, Metrics
from .loss import Loss, PackedRows
from .preference import compare, pairs
from .preference_loss import bradley_terry, num_pairs, pairs_of_rows
from .roles import Reward, Trainable

if TYPE_CHECKING:
    from torch import Tensor


class RewardLoss(Config):
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
    """How far the preferred response is to be ahead; or the column that says it of each pair (its two rows say the same)."""
    centring: float = Field(default=0.0, ge=0)
    """c: keeps the rewards of a pair around 0; 0.01 is common."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (str(GROUP_ID), str(PREFERRED), *((self.margin,) if isinstance(self.margin, str) else ()))

    @property
    def may_read(self) -> tuple[str, ...]:
        return (str(RESPONSE_MASK),)

    @property
    def needs_entropy(self) -> bool:
        return False

    @property
    def whole_groups(self) -> bool:
        return True

    def count(self, rows: PackedRows) -> float:
        """Pairs with a trained token in both responses.

        Raises:
            UserError: when a group is no pair.
        """
        return num_pairs(rows)

    def __call__(self, rewards: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """The undivided loss, and its metrics.

        Args:
            rewards: [T] of each token, that of the sequence up to it; gradient flows, from the last of each row.
            rows: with the columns of `reads`, none of which gets a gradient.

        Returns:
            (scalar, metrics). 0 with a gradient of 0 without a pair. Means over pairs: `chosen_reward`, `rejected_reward`,
            `reward_margin` (their difference) and `preference_accuracy` (how often that is above 0).
        """
        sides, last = pairs_of_rows(rows), rows.cu_seqlens[1:] - 1
        chosen, rejected = (rewards[last[side]] for side in sides)
        margin = rows[self.margin][sides[0]] if isinstance(self.margin, str) else self.margin
        losses = bradley_terry(chosen, rejected, margin) + self.centring * (chosen + rejected).square()
        ahead = chosen - rejected
        watched = {
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "reward_margin": ahead,
            "preference_accuracy": ahead > 0,
        }
        totals = torch.stack([values.detach().sum() for values in watched.values()]).tolist()
        number = float(len(chosen))
        return losses.sum(), {name: Mean(total, number) for name, total in zip(watched, totals, strict=True)}


@graph
def reward_model(preferences: Any, *, model: Trainable, loss: Loss = RewardLoss()) -> Any:
    """Train a reward model on given pairs (`prompt_ids`, `chosen_ids`, `rejected_ids`, and the column of a margin)."""
    return model.update(pairs(preferences), loss=loss)


@graph
def reward_accuracy(preferences: Any, *, model: Reward) -> Any:
    """An evaluation: how often a reward model gives the preferred response the higher reward. Its metrics are
    `weft.functions/preference_accuracy` and `weft.functions/preference_margin`."""
    return compare(model.score(pairs(preferences)), score=str(REWARD))
