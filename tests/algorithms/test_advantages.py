"""Group advantages: numbers by hand, properties, and a plain float64 reference."""

import time

import numpy as np
import pytest
import torch

from weft.algorithms.advantages import group_advantages, group_centred, group_normalized, leave_one_out
from weft.dataflow.batch import Batch

ESTIMATORS = [group_normalized, group_centred, leave_one_out]


def reference(estimator: object, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    out = np.zeros(len(rewards))
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        r = rewards[rows].astype(np.float64)
        for i, row in enumerate(rows):
            if len(rows) == 1 or (r == r[0]).all():
                continue
            if estimator is leave_one_out:
                out[row] = r[i] - np.delete(r, i).mean()
            else:
                out[row] = (r[i] - r.mean()) / (r.std(ddof=1) + 1e-6 if estimator is group_normalized else 1)
    return out


def test_by_hand():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 3.0]), torch.tensor([0, 0, 0, 0])  # mean 1, deviation sqrt(2)
    assert group_centred(rewards, groups).tolist() == [0, -1, -1, 2]
    assert group_normalized(rewards, groups, epsilon=0).tolist() == pytest.approx([0, -(0.5**0.5), -(0.5**0.5), 2**0.5])
    assert leave_one_out(rewards, groups).tolist() == pytest.approx([0, -4 / 3, -4 / 3, 8 / 3])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_against_a_loop_over_groups(estimator):
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 40, 200)
    groups = np.unique(groups, return_inverse=True)[1]
    rewards = rng.normal(size=200).astype(np.float32)
    mine = estimator(torch.from_numpy(rewards), torch.from_numpy(groups)).numpy()
    assert mine.dtype == np.float32
    np.testing.assert_allclose(mine, reference(estimator, rewards, groups), atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 1e8, -3.7])
def test_equal_rewards_and_single_rows_give_exact_zeros(estimator, reward: float):
    groups = torch.tensor([0] * 7 + [1])
    assert estimator(torch.full((8,), reward), groups).tolist() == [0.0] * 8
    assert estimator(torch.tensor([]), torch.tensor([], dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_order_of_rows_and_a_constant_on_all_rewards_do_not_matter(estimator):
    torch.manual_seed(0)
    rewards, groups = torch.randn(64), torch.arange(64) % 8
    order = torch.randperm(64)
    plain = estimator(rewards, groups)
    torch.testing.assert_close(estimator(rewards[order], groups[order]), plain[order])
    torch.testing.assert_close(estimator(rewards + 5, groups), plain, atol=1e-5, rtol=1e-5)
    sums = torch.zeros(8).index_add_(0, groups, plain)
    assert sums.abs().max() < 1e-5  # each group sums to nothing


def test_every_token_of_a_response_gets_its_rows_advantage():
    samples = Batch.of(group_id=[9, 4, 9, 4], reward=[1, 5, 0, 5], response_ids=[[1, 2], [3], [4, 5, 6], []])
    out = group_advantages(samples.slice(0, 4), estimator=group_centred)
    assert out["advantages"].to_pylist() == [[0.5, 0.5], [0.0], [-0.5, -0.5, -0.5], []]
    assert group_advantages(samples.slice(0, 0))["advantages"].to_pylist() == []
    assert group_advantages(samples.slice(1, 3), estimator=group_centred)["advantages"].to_pylist() == [
        [0.0],
        [0.0] * 3,
        [],
    ]


def test_thirty_two_thousand_rows_take_milliseconds():
    rng = np.random.default_rng(0)
    lengths = np.full(32_768, 16)
    samples = Batch.of(
        group_id=rng.permutation(np.arange(32_768) // 8),
        reward=rng.normal(size=32_768),
        response_ids=(np.zeros(lengths.sum(), dtype=np.int32), np.concatenate([[0], lengths.cumsum()])),
    )
    group_advantages(samples)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        group_advantages(samples)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1
