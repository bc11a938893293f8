"""Episodes: statistics of groups count each episode once, and only episodes with trained tokens."""

from typing import Any

import numpy as np
import pytest

from weft.algorithms.advantages import (
    best_of_group,
    group_advantages,
    group_centred,
    group_normalized,
    groups_without_signal,
    leave_one_out,
    length_weighted,
    valid_groups_centred,
)
from weft.algorithms.episodes import Episodes
from weft.algorithms.evaluation import score_prompts
from weft.algorithms.grpo import drop_zero_variance, first_of_group
from weft.algorithms.preference import best_and_worst
from weft.algorithms.rewards import penalize_overlong
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError

ESTIMATORS = [
    group_normalized,
    group_centred,
    leave_one_out,
    length_weighted,
    valid_groups_centred,
    best_of_group,
]


def random_episodes(seed: int = 0) -> tuple[Batch, Batch, np.ndarray]:
    """Return rows of 60 episodes, in random order; the same episodes as one row each; and the
    episode of each row. A third of the rows, and a few whole episodes, are masked."""
    draw = np.random.default_rng(seed)
    of_row = np.repeat(np.arange(60), draw.integers(1, 5, 60))
    draw.shuffle(of_row)
    groups, rewards = draw.integers(0, 12, 60), draw.integers(0, 3, 60) / 2
    lengths = draw.integers(1, 7, len(of_row))
    masks = [(draw.random(n) < 0.6) & (draw.random() < 0.67) for n in lengths]
    rows = Batch.of(
        sample_id=1000 + draw.permutation(len(of_row)),
        group_id=groups[of_row],
        episode_id=of_row * 7 - 100,
        episode_rows=np.bincount(of_row)[of_row],
        reward=rewards[of_row],
        response_ids=[[1] * n for n in lengths],
        response_mask=[mask.astype(np.uint8).tolist() for mask in masks],
    )
    joined = [
        np.concatenate([m for m, e in zip(masks, of_row, strict=True) if e == k]) for k in range(60)
    ]
    alone = Batch.of(
        sample_id=np.arange(60),
        group_id=groups,
        reward=rewards,
        response_ids=[[1] * len(mask) for mask in joined],
        response_mask=[mask.astype(np.uint8).tolist() for mask in joined],
    )
    return rows, alone, of_row


def of_rows(samples: Batch) -> list[float]:
    """The advantage of each row's trained tokens; 0 if it has none."""
    masks = samples["response_mask"].to_pylist()
    return [
        next((a for a, kept in zip(advantages, mask, strict=True) if kept), 0.0)
        for advantages, mask in zip(samples["advantages"].to_pylist(), masks, strict=True)
    ]


def test_an_episode_counts_once_in_its_group_however_many_rows_it_has():
    samples = Batch.of(
        group_id=[7, 7, 7, 7],
        episode_id=[5, 5, 5, 6],
        reward=[1.0, 1.0, 1.0, 0.0],
        response_ids=[[1], [2, 3], [4], [5]],
    )
    made = group_advantages(samples, estimator=group_centred)["advantages"].to_pylist()
    assert made == [[0.5], [0.5, 0.5], [0.5], [-0.5]], "not 1/4 and -3/4, the means over rows"
    weighted = group_advantages(samples, estimator=length_weighted)["advantages"].to_pylist()
    # Lengths 4 and 1: the baseline is 4/5.
    assert weighted[3] == [pytest.approx(-0.8)] and weighted[1] == [pytest.approx(0.2)] * 2


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rows_of_episodes_get_the_advantages_of_the_same_episodes_in_one_row_each(estimator: Any):
    rows, alone, of_row = random_episodes()
    made, expected = (group_advantages(samples, estimator=estimator) for samples in (rows, alone))
    has_tokens = np.array([any(mask) for mask in rows["response_mask"].to_pylist()])
    wanted = np.where(has_tokens, np.array(of_rows(expected))[of_row], 0.0)
    np.testing.assert_allclose(of_rows(made), wanted, rtol=1e-6, atol=1e-6)
    assert np.count_nonzero(wanted) > 4


@pytest.mark.parametrize("seed", range(3))
def test_filters_and_metrics_do_not_depend_on_the_number_of_rows(seed: int):
    rows, alone, _ = random_episodes(seed)
    kept, dropped = drop_zero_variance(rows)
    kept_alone, dropped_alone = drop_zero_variance(alone)
    assert {*kept["group_id"].to_pylist()} == {*kept_alone["group_id"].to_pylist()}
    assert dropped["zero_variance_groups"] == dropped_alone["zero_variance_groups"]
    assert groups_without_signal(rows) == groups_without_signal(alone)
    mine, expected = (score_prompts(samples, n=4, k=(1, 2)) for samples in (rows, alone))
    assert {n: m.value for n, m in mine.items()} == {n: m.value for n, m in expected.items()}


@pytest.mark.pitfall(14)
def test_masked_rows_do_not_vote():
    """The example of NeMo-RL's bug: rewards 1, 1, 0, 0, and the second response is masked."""
    samples = Batch.of(
        group_id=[3] * 4,
        reward=[1.0, 1.0, 0.0, 0.0],
        response_ids=[[1]] * 4,
        response_mask=[[1], [0], [1], [1]],
    )
    found = {
        estimator: [
            a for (a,) in group_advantages(samples, estimator=estimator)["advantages"].to_pylist()
        ]
        for estimator in (group_centred, group_normalized, leave_one_out)
    }
    assert found[group_centred] == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    assert found[group_normalized] == pytest.approx([1.1547, 0, -0.57735, -0.57735], abs=1e-4)
    assert found[leave_one_out] == pytest.approx([1, 0, -0.5, -0.5])


def test_a_group_whose_only_difference_is_masked_gives_no_signal():
    samples = Batch.of(
        sample_id=[1, 2, 3, 4],
        group_id=[3, 3, 3, 4],
        reward=[1.0, 1.0, 0.0, 9.0],
        response_ids=[[1]] * 4,
        response_mask=[[1], [1], [0], [0]],
    )
    kept, metrics = drop_zero_variance(samples)
    assert len(kept) == 0 and metrics["zero_variance_groups"].value == 2
    assert groups_without_signal(samples)["groups_without_signal"].value == 1
    pairs, metrics = best_and_worst(samples)
    assert len(pairs) == 0 and metrics["tied_groups"].value == 2
    found = score_prompts(samples, n=3, k=(2,))
    assert found["avg@3"].value == 1 and found["prompts"].value == 1, "group 4 has no response"
    assert group_advantages(samples)["advantages"].to_pylist() == [[0.0]] * 4


def test_nothing_to_count_is_no_error():
    samples = Batch.of(
        sample_id=[1], group_id=[3], reward=[1.0], response_ids=[[1]], response_mask=[[0]]
    )
    for none in (samples, samples.slice(0, 0)):
        assert len(Episodes.of(none)) == 0
        assert all(a == [0.0] for a in group_advantages(none)["advantages"].to_pylist())
        assert score_prompts(none, n=1, k=(1,))["prompts"].value == 0
        assert len(best_and_worst(none)[0]) == len(drop_zero_variance(none)[0]) == 0


@pytest.mark.parametrize("node", [group_advantages, drop_zero_variance, best_and_worst])
def test_rows_of_an_episode_with_different_rewards_are_refused(node: Any):
    samples = Batch.of(
        sample_id=[1, 2, 3],
        group_id=[7, 7, 7],
        episode_id=[5, 6, 5],
        reward=[1.0, 0.5, 0.0],
        response_ids=[[1], [2], [3]],
    )
    with pytest.raises(
        UserError,
        match=r"episode 5 has different values in column 'reward': 1\.0 in sample 1, 0\.0 in sample 3\. An episode",
    ):
        node(samples)
    same = samples.with_columns(reward=[np.nan, 0.5, np.nan])
    assert len(drop_zero_variance(same)[0]) == 3, "NaN equals NaN"


def test_a_reward_that_is_no_number_is_named():
    samples = Batch.of(group_id=[7], verdict=["good"], response_ids=[[1]])
    with pytest.raises(UserError, match="column 'verdict' is string, not one number a row"):
        group_advantages(samples, reward="verdict")


def test_a_pair_takes_one_row_of_each_side():
    samples = Batch.of(
        sample_id=[1, 2, 3, 4],
        group_id=[7] * 4,
        episode_id=[5, 6, 6, 8],
        reward=[1.0, 0.5, 0.5, 0.0],
    )
    assert best_and_worst(samples)[0]["sample_id"].to_pylist() == [1, 4], "the middle may have rows"
    with pytest.raises(UserError, match="best_and_worst: episode 6 has several rows"):
        best_and_worst(samples.take([0, 1, 2]))


def test_a_quorum_keeps_only_whole_episodes():
    samples = Batch.of(
        sample_id=[1, 2, 3, 4],
        reward=[1.0, 0.0, 0.0, 1.0],
        episode_id=[5, 6, 6, 8],
        episode_rows=[2, 2, 2, 1],
    )
    assert first_of_group(samples, 4)["sample_id"].to_pylist() == [2, 3, 4]
    assert len(first_of_group(samples.slice(0, 0), 4)) == 0


def test_the_overlong_penalty_is_that_of_the_whole_episode():
    samples = Batch.of(
        reward=[1.0, 1.0, 1.0],
        response_ids=[[1, 2], [1, 2, 3], [4]],
        episode_tokens=[4, 4, 1],
    )
    out = penalize_overlong(samples, max_tokens=4, buffer_tokens=2)["shaped_reward"].to_pylist()
    assert out == [0.0, 0.0, 1.0]
