"""Losses of reward models: numbers by hand, and rows that are left out."""

import math

import pytest
import torch

from weft.algorithms.loss import PackedRows
from weft.algorithms.reward_model import RewardLoss, StepLoss, label_steps, step_rewards
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError

REWARDS = torch.tensor([9.0, 2.0, 7.0, 1.0, -3.0, 0.5, 4.0])
"""For rows of 2, 2, 1, 1 and 1 tokens."""


def rows(**columns: object) -> PackedRows:
    given = {"group_id": [4, 4, 8, 8], "preferred": [1, 0, 0, 1], "gap": [0.5, 0.5, 1.0, 1.0], **columns}
    return PackedRows.of([2, 2, 1, 1], **given)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_the_loss_is_bradley_terry_of_last_tokens_by_hand():
    rewards = REWARDS[:6].clone().requires_grad_()
    loss_sum, metrics = RewardLoss()(rewards, rows())
    assert loss_sum.item() == pytest.approx(softplus(-(2 - 1)) + softplus(-(0.5 + 3)))
    assert metrics["reward_margin"].value == pytest.approx((1 + 3.5) / 2)
    assert metrics["preference_accuracy"].value == 1 and RewardLoss().count(rows()) == 2
    (gradient,) = torch.autograd.grad(loss_sum, rewards)
    assert gradient.tolist() == pytest.approx(
        [
            0,
            -1 / (1 + math.exp(1)),
            0,
            1 / (1 + math.exp(1)),
            1 / (1 + math.exp(3.5)),
            -1 / (1 + math.exp(3.5)),
        ]
    )


def test_a_margin_is_a_number_or_a_column():
    expected = softplus(-(1 - 0.5)) + softplus(-(3.5 - 1.0))
    assert RewardLoss(margin="gap")(REWARDS[:6], rows())[0].item() == pytest.approx(expected)
    assert "gap" in RewardLoss(margin="gap").reads and "gap" not in RewardLoss().reads
    assert RewardLoss(margin=0.5)(REWARDS[:6], rows())[0].item() == pytest.approx(
        softplus(-0.5) + softplus(-3.0)
    )


def test_centring_keeps_pairs_around_zero():
    more = RewardLoss(centring=0.1)(REWARDS[:6], rows())[0] - RewardLoss()(REWARDS[:6], rows())[0]
    assert more.item() == pytest.approx(0.1 * ((2 + 1) ** 2 + (-3 + 0.5) ** 2), rel=1e-5)


def test_a_pair_with_a_masked_response_is_left_out_and_half_a_pair_is_an_error():
    masked = rows(response_mask=[1, 0, 1, 1, 0, 1])
    assert RewardLoss().count(masked) == 1
    assert RewardLoss()(REWARDS[:6], masked)[0].item() == pytest.approx(softplus(-1))
    nobody = rows(response_mask=[0] * 6)
    rewards = REWARDS[:6].clone().requires_grad_()
    loss_sum, _ = RewardLoss()(rewards, nobody)
    assert loss_sum.item() == 0 and torch.autograd.grad(loss_sum, rewards)[0].tolist() == [0] * 6
    with pytest.raises(UserError, match="group 8 has 2 rows, 2 of them preferred"):
        RewardLoss().count(rows(preferred=[1, 0, 1, 1]))


def test_a_step_is_judged_at_its_end():
    packed = PackedRows.of([3, 1], step_labels=[math.nan, 1.0, 0.25, 0.0], response_mask=[1, 1, 1, 0])
    logits = torch.tensor([math.nan, 2.0, -1.0, 5.0])
    loss_sum, metrics = StepLoss()(logits, packed)
    assert loss_sum.item() == pytest.approx(softplus(-2) + 0.25 * softplus(1) + 0.75 * softplus(-1))
    assert StepLoss().count(packed) == 2 and metrics["step_accuracy"].value == 1


def test_steps_end_with_the_separator_and_with_the_response():
    samples = Batch.of(
        response_ids=[[9, 1, 9], [2], []],
        labels=[[1.0, 0.5], [0.0], []],
        token_scores=[[0.0, 0.0, 100.0], [-100.0], []],
    )
    labels = label_steps(samples, separator=9)["step_labels"].to_pylist()
    assert (
        labels[0][0] == 1
        and math.isnan(labels[0][1])
        and labels[0][2] == 0.5
        and labels[1:] == [[0], []]
    )
    assert step_rewards(samples, separator=9)["token_rewards"].to_pylist() == [[0.5, 0, 1], [0], []]
    with pytest.raises(UserError, match="row 0 has 2 labels and 1 steps, which end with token 8"):
        label_steps(samples, separator=8)
