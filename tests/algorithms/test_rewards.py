"""Rewards: numbers by hand, and no token or reward is lost."""

import pytest
import torch

from weft.algorithms.kl import AdaptiveCoefficient, k3
from weft.algorithms.loss import PackedRows
from weft.algorithms.rewards import (
    outcome_rewards,
    overlong_penalty,
    penalize_overlong,
    penalized_token_rewards,
    token_rewards,
)
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError


def test_the_penalty_falls_over_the_buffer_by_hand():
    lengths = torch.tensor([0, 16, 17, 18, 20, 21, 1000])
    penalties = overlong_penalty(lengths, max_tokens=20, buffer_tokens=4)
    assert penalties.tolist() == [0, 0, -0.25, -0.5, -1, -1, -1] and penalties.dtype == torch.float32
    assert (
        overlong_penalty(torch.tensor([], dtype=torch.int64), max_tokens=1, buffer_tokens=1).tolist()
        == []
    )
    for buffer in (0, 21):
        with pytest.raises(UserError, match=f"buffer_tokens must be 1 to max_tokens=20, not {buffer}"):
            overlong_penalty(lengths, max_tokens=20, buffer_tokens=buffer)


def test_the_node_writes_a_separate_column():
    samples = Batch.of(response_ids=[[1] * 3, [1] * 4, []], reward=[1.0, 1.0, 0.5])
    out = penalize_overlong(samples, max_tokens=4, buffer_tokens=2, factor=0.5)
    assert out["shaped_reward"].to_pylist() == [0.75, 0.5, 0.5] and out["reward"].to_pylist() == [
        1.0,
        1.0,
        0.5,
    ]
    assert len(penalize_overlong(samples.slice(0, 0), max_tokens=4, buffer_tokens=2)) == 0


def test_the_reward_is_at_the_last_trained_token():
    rows = PackedRows.of([3, 0, 2, 2, 1], response_mask=[1, 1, 0, 0, 1, 0, 0, 1])
    kl = torch.tensor([1.0, 2.0, torch.nan, torch.nan, 3.0, torch.nan, torch.nan, 0.0])
    out = penalized_token_rewards(torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0]), kl, rows, 0.5)
    assert out.tolist() == [-0.5, 9.0, 0.0, 0.0, 28.5, 0.0, 0.0, 50.0]


def test_token_rewards_add_up_to_the_reward_less_the_divergence():
    torch.manual_seed(0)
    lengths = torch.randint(1, 9, (50,))
    rewards, kl = torch.randn(50), torch.randn(int(lengths.sum()))
    rows = PackedRows.of(lengths)
    out = penalized_token_rewards(rewards, kl, rows, 0.3)
    torch.testing.assert_close(rows.sums(out), rewards - 0.3 * rows.sums(kl))


def test_the_node_takes_a_constant_or_an_adaptive_coefficient_and_any_estimator():
    samples = Batch.of(
        reward=[1.0],
        old_logprobs=[[-1.0, -2.0, -9.0]],
        reference_logprobs=[[-1.5, -1.0, 0.0]],
        response_mask=[[1, 1, 0]],
    )
    out = token_rewards(samples, coefficient=0.5, old="old_logprobs")["token_rewards"].to_pylist()
    assert out == [[-0.25, 1.5, 0.0]]
    adaptive = AdaptiveCoefficient(value=0.5)
    assert (
        token_rewards(samples, coefficient=adaptive, old="old_logprobs")["token_rewards"].to_pylist()
        == out
    )
    of_k3 = token_rewards(samples, coefficient=1.0, estimator=k3, old="old_logprobs")[
        "token_rewards"
    ].to_pylist()
    assert of_k3[0] == pytest.approx([-(0.6065307 - 1 + 0.5), 1 - (2.7182818 - 1 - 1), 0.0])


def test_without_a_penalty_the_reward_is_unchanged():
    samples = Batch.of(response_ids=[[1, 2, 3], [4]], response_mask=[[1, 1, 0], [0]], reward=[2.0, 5.0])
    assert outcome_rewards(samples)["token_rewards"].to_pylist() == [[0, 2, 0], [0]]
