"""Rewards: numbers by hand, and no token or reward is lost."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.algorithms.kl import AdaptiveCoefficient, k3
from weft.algorithms.loss import PackedRows
from weft.algorithms.rewards import (
    brevity_rewards,
    cosine_rewards,
    outcome_rewards,
    overlong_penalty,
    penalize_overlong,
    penalize_repetition,
    penalize_truncated,
    penalized_token_rewards,
    repetition,
    rescale_rewards,
    reward_brevity,
    reward_by_length,
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


@given(
    lengths=st.lists(st.integers(0, 300), max_size=8),
    right=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_cosine_rewards_against_the_papers_formula(lengths: list[int], right: list[bool]):
    """The paper's CosFn(t, T, eta_min, eta_max) starts at eta_max."""
    correct = torch.tensor(right[: len(lengths)], dtype=torch.bool)
    found = cosine_rewards(
        torch.tensor(lengths), correct, max_tokens=200, of_right=(2.0, 1.0), of_wrong=(-10.0, 0.0)
    )
    for length, good, mine in zip(lengths, right, found.tolist(), strict=False):
        smallest, largest = (1.0, 2.0) if good else (0.0, -10.0)
        cosine = math.cos(min(length, 200) * math.pi / 200)
        assert mine == pytest.approx(smallest + 0.5 * (largest - smallest) * (1 + cosine), abs=1e-5)


def test_rewards_by_length_use_the_length_of_the_episode():
    samples = Batch.of(response_ids=[[1, 2], [3]], reward=[1.0, 0.0], episode_tokens=[8, 2])
    out = reward_by_length(samples, max_tokens=4, of_right=(2.0, 1.0), of_wrong=(-4.0, 0.0))
    assert out["shaped_reward"].to_pylist() == pytest.approx([1.0, -2.0])
    with pytest.raises(UserError, match="max_tokens must be at least 1, not 0"):
        reward_by_length(samples, max_tokens=0)


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 4))
def test_repetition_against_sets(tokens: list[int], ngram: int):
    grams = [tuple(tokens[k : k + ngram]) for k in range(len(tokens) - ngram + 1)]
    expected = 1 - len(set(grams)) / len(grams) if grams else 0.0
    assert repetition(np.array(tokens, dtype=np.int32), ngram) == pytest.approx(expected)


def test_the_penalty_for_repetition_counts_trained_tokens_and_is_equal_in_an_episode():
    samples = Batch.of(
        group_id=[7, 7, 7],
        response_ids=[[5, 5, 5, 9, 9, 9], [1, 2, 3], [4, 4, 4]],
        response_mask=[[1, 1, 1, 0, 0, 0], [1, 1, 1], [1, 1, 1]],
        reward=[1.0, 1.0, 1.0],
    )
    out = penalize_repetition(samples, ngram=1, factor=0.5)
    assert out["shaped_reward"].to_pylist() == pytest.approx([2 / 3, 1.0, 2 / 3])
    together = penalize_repetition(samples.with_columns(episode_id=[3, 4, 4]), ngram=1)
    assert together["shaped_reward"].to_pylist() == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    assert len(penalize_repetition(samples.slice(0, 0))) == 0
    with pytest.raises(UserError, match="ngram must be at least 1, not 0"):
        penalize_repetition(samples, ngram=0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans()), max_size=10))
def test_brevity_against_loops(rows: list[tuple[int, int, bool]]):
    groups = np.unique([g for g, _, _ in rows], return_inverse=True)[1].astype(np.int64)
    lengths, right = torch.tensor([n for _, n, _ in rows]), torch.tensor([c for _, _, c in rows])
    found = brevity_rewards(lengths, right.bool(), torch.from_numpy(groups)).tolist()
    for (group, length, good), mine in zip(rows, found, strict=True):
        own = [n for g, n, _ in rows if g == group]
        share = 0.5 - (length - min(own)) / (max(own) - min(own)) if max(own) > min(own) else 0.0
        assert mine == pytest.approx(share if good else min(0.0, share))


def test_brevity_counts_an_episode_once_and_ignores_masked_ones():
    samples = Batch.of(
        group_id=[7, 7, 7, 7],
        episode_id=[1, 1, 2, 3],
        response_ids=[[1], [1, 2], [1], [1] * 9],
        response_mask=[[1], [1, 1], [1], [0] * 9],
        reward=[1.0, 1.0, 1.0, 5.0],
    )
    out = reward_brevity(samples, factor=1.0)
    assert out["shaped_reward"].to_pylist() == [0.5, 0.5, 1.5, 5.0]


def test_truncated_responses_keep_a_share_of_their_reward():
    samples = Batch.of(
        episode_id=[1, 1, 2], finish_reason=["length", "stop", "stop"], reward=[2.0, 2.0, 2.0]
    )
    assert penalize_truncated(samples, keep=0.25)["shaped_reward"].to_pylist() == [0.5, 0.5, 2.0]
    assert penalize_truncated(samples)["shaped_reward"].to_pylist() == [0.0, 0.0, 2.0]


def test_shaping_nodes_are_combined_by_naming_their_columns():
    samples = Batch.of(
        reward=[3.0, 0.0], finish_reason=["stop", "length"], response_ids=[[1, 2], [3, 3]]
    )
    out = rescale_rewards(samples, factor=0.5, shift=1.0, limits=(-1.0, 1.5))
    assert out["shaped_reward"].to_pylist() == [1.5, 0.5]
    again = penalize_truncated(out, keep=0.5, reward="shaped_reward", into="stopped_reward")
    assert again["stopped_reward"].to_pylist() == [1.5, 0.25]
    assert again["reward"].to_pylist() == [3.0, 0.0]
    with pytest.raises(UserError, match=r"limits must be \(smallest, largest\), not \(1, 0\)"):
        rescale_rewards(samples, limits=(1, 0))


def test_truncation_does_not_pay_if_rewards_are_negative():
    samples = Batch.of(finish_reason=["length", "stop", "length"], reward=[-1.0, -1.0, 1.0])
    assert penalize_truncated(samples, keep=0.0)["shaped_reward"].to_pylist() == [-1.0, -1.0, 0.0]
