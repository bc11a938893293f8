"""Filters: the groups and rows that pass."""

import numpy as np
import pytest

from weft.algorithms.grpo import drop_zero_variance, mask_truncated
from weft.dataflow.batch import Batch


def test_groups_of_equal_rewards_are_dropped_and_counted():
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat([3, 5, 8, 9], [4, 1, 3, 5]))
    rewards = np.where(np.isin(groups, [3, 5]), np.float32(0.1), rng.random(13).astype(np.float32))
    kept, metrics = drop_zero_variance(
        Batch.of(sample_id=np.arange(13), group_id=groups, reward=rewards)
    )
    assert kept["sample_id"].to_pylist() == np.flatnonzero(np.isin(groups, [8, 9])).tolist(), (
        "in the order given"
    )
    assert metrics["zero_variance_groups"].value == 2


@pytest.mark.parametrize("rewards", [[1.0, np.nan], [np.nan, np.nan]])
def test_a_group_with_a_reward_that_is_not_a_number_is_not_hidden(rewards: list[float]):
    kept, _ = drop_zero_variance(Batch.of(group_id=[1, 1], reward=rewards))
    assert len(kept) == 2


def test_an_episode_with_a_truncated_row_is_masked():
    samples = Batch.of(
        response_ids=[[1, 2], [3], [4, 5]],
        response_mask=[[1, 0], [1], [1, 1]],
        finish_reason=["stop", "length", "stop"],
        episode_id=[7, 7, 8],
    )
    masked, metrics = mask_truncated(samples)
    assert masked["response_mask"].to_pylist() == [[0, 0], [0], [1, 1]]
    assert metrics["truncated_rows"].value == 2


def test_another_column_may_be_compared_and_no_rows_are_none():
    samples = Batch.of(group_id=[1, 1], reward=[1.0, 1.0], shaped_reward=[1.0, 0.5])
    assert len(drop_zero_variance(samples, by="shaped_reward")[0]) == 2
    none, metrics = drop_zero_variance(samples.slice(0, 0))
    assert len(none) == 0 and metrics["zero_variance_groups"].value == 0
