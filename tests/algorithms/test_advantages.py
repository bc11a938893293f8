"""Group advantages: numbers by hand, properties, and a plain float64 reference."""

import numpy as np
import pytest
import torch

from weft.algorithms.advantages import (
    Outcomes,
    RewardNormalized,
    batch_normalized,
    best_of_group,
    greedy_baseline,
    group_advantages,
    group_centred,
    group_normalized,
    groups_without_signal,
    leave_one_out,
    length_weighted,
    mean_normalized,
    valid_groups_centred,
)
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph

ESTIMATORS = [
    group_normalized,
    group_centred,
    leave_one_out,
    length_weighted,
    valid_groups_centred,
    batch_normalized,
    mean_normalized,
    best_of_group,
]
WITHIN_A_GROUP = [e for e in ESTIMATORS if e not in (valid_groups_centred, batch_normalized)]


def random_outcomes(num_rows: int = 200, num_groups: int = 40) -> Outcomes:
    rng = np.random.default_rng(0)
    groups = np.unique(rng.integers(0, num_groups, num_rows), return_inverse=True)[1]
    rewards = np.where(groups < 5, 0.25, rng.integers(0, 4, num_rows) / 4).astype(
        np.float32
    )  # some equal, some tied
    return Outcomes.of(
        torch.from_numpy(rewards),
        torch.from_numpy(groups),
        torch.from_numpy(rng.integers(1, 50, num_rows)),
    )


def reference(estimator: object, outcomes: Outcomes) -> np.ndarray:
    """Compute the papers' formulas, by group and row."""
    rewards, groups, lengths = (t.numpy() for t in (outcomes.rewards, outcomes.groups, outcomes.lengths))
    out = np.zeros(len(rewards))
    num_valid = sum(len(set(rewards[groups == g])) > 1 for g in groups)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        r = rewards[rows].astype(np.float64)
        for i, row in enumerate(rows):
            others = np.delete(r, i)
            if len(others) == 0:
                continue
            out[row] = {
                group_normalized: (r[i] - r.mean()) / (r.std(ddof=1) + 1e-6),
                group_centred: r[i] - r.mean(),
                leave_one_out: r[i] - others.mean(),
                length_weighted: r[i] - (lengths[rows] * r).sum() / lengths[rows].sum(),
                valid_groups_centred: (r[i] - r.mean()) * len(rewards) / num_valid,
                batch_normalized: (r[i] - r.mean()) / (rewards.astype(float).std(ddof=1) + 1e-6),
                mean_normalized: (r[i] - r.mean()) / r.mean() if r.mean() > 0 else 0,
                best_of_group: max(r) - max(others),
            }[estimator]
    return out


def test_maxrl_weighs_rare_success_by_its_rarity():
    rewards, groups = (
        [1.0] + [0.0] * 9 + [1.0] * 9 + [0.0] + [-1.0, -1.0, 1.0],
        [0] * 10 + [1] * 10 + [2] * 3,
    )
    found = mean_normalized(Outcomes.of(rewards, groups)).tolist()
    assert found[:2] == pytest.approx([9.0, -1.0]) and found[10] == pytest.approx(1 / 9)
    assert found[-3:] == [0, 0, 0], "a mean below 0 gives no signal"


def test_rows_are_compared_within_a_part_of_their_group():
    """Two problems of each proposer, with two solutions each: problems differ, not solutions."""
    samples = Batch.of(
        group_id=[1, 1, 1, 1, 2, 2, 2, 2],
        parent_id=[5, 5, 6, 6, 5, 5, 8, 8],
        reward=[1.0, 0.0, 0.25, 0.75, 2.0, 4.0, 1.0, 1.0],
        response_ids=[[1]] * 8,
    )
    found = group_advantages(samples, estimator=group_centred, within="parent_id")
    assert found["advantages"].to_pylist() == [
        *([0.5], [-0.5], [-0.25], [0.25]),
        *([-1.0], [1.0], [0.0], [0.0]),
    ]
    assert groups_without_signal(samples, within="parent_id") == {}


def test_signal_of_shaping_is_the_share_of_groups_whose_outcomes_are_equal():
    samples = Batch.of(
        group_id=[1, 1, 2, 2, 3, 3],
        reward=[1.0, 1.0, 1.0, 0.0, 0.0, 0.0],
        shaped_reward=[0.5, 1.0, 1.0, 0.0, 0.0, 0.0],
        response_ids=[[1]] * 6,
    )
    found = groups_without_signal(samples, reward="shaped_reward")
    assert found["signal_of_shaping"].value == 0.5
    assert found["groups_without_signal"].value == pytest.approx(1 / 3)
    assert "signal_of_shaping" not in groups_without_signal(samples)
    rows = samples.with_columns(episode_id=[1, 1, 2, 2, 3, 3], reward=[1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    rows = rows.with_columns(shaped_reward=[1.0, 1.0, 0.0, 0.0, 0.0, 0.0], group_id=[1] * 6)
    assert "signal_of_shaping" not in groups_without_signal(rows, reward="shaped_reward")
    same = samples.with_columns(**{"reward/form": [0.5, 1.0, 1.0, 0.0, 0.0, 0.0]})
    assert "signal_of_shaping" not in groups_without_signal(same, reward="reward/form")


def test_by_hand():
    outcomes = Outcomes.of(
        [1.0, 0.0, 0.0, 3.0], groups=[0, 0, 0, 0], lengths=[2, 1, 1, 4]
    )  # mean 1, deviation sqrt(2)
    assert group_centred(outcomes).tolist() == [0, -1, -1, 2]
    assert group_normalized(outcomes, epsilon=0).tolist() == pytest.approx(
        [0, -(0.5**0.5), -(0.5**0.5), 2**0.5]
    )
    assert leave_one_out(outcomes).tolist() == pytest.approx([0, -4 / 3, -4 / 3, 8 / 3])
    assert length_weighted(outcomes).tolist() == [-0.75, -1.75, -1.75, 1.25]  # baseline (2 + 12) / 8
    assert best_of_group(outcomes).tolist() == [0, 0, 0, 2]


def test_rows_of_equal_rewards_are_made_up_for():
    outcomes = Outcomes.of([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 2.0, 0.0], groups=[0, 0, 1, 1, 2, 2, 3, 3])
    assert valid_groups_centred(outcomes).tolist() == [
        1,
        -1,
        0,
        0,
        0,
        0,
        2,
        -2,
    ]  # 8 rows, 4 of them in valid groups


def test_only_a_single_best_row_adds_to_the_best_of_its_group():
    outcomes = Outcomes.of([1.0, 1.0, 0.0, -1.0, -3.0, 5.0], groups=[0, 0, 0, 1, 1, 2])
    assert best_of_group(outcomes).tolist() == [0, 0, 0, 2, 0, 0]


def test_the_advantages_of_best_of_group_are_the_gradient_of_the_expected_best():
    """For n draws from three rewards: n E[sum_i A_i grad log p_i] / n = grad E[max], by
    enumeration."""
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    p, draws = torch.softmax(logits, 0), torch.cartesian_prod(*[torch.arange(3)] * 3)
    weights = p[draws].prod(1)
    expected = torch.autograd.grad((weights * rewards[draws].amax(1)).sum(), logits, retain_graph=True)[
        0
    ]
    advantages = torch.stack(
        [best_of_group(Outcomes.of(rewards[draw], groups=[0] * 3)).double() for draw in draws]
    )
    surrogate = (weights.detach() * (advantages * p[draws].log()).sum(1)).sum()
    torch.testing.assert_close(torch.autograd.grad(surrogate, logits)[0], expected)


def test_each_reward_is_normalised_before_they_are_added():
    rng = np.random.default_rng(1)
    outcomes = random_outcomes()
    columns = {"reward/right": outcomes.rewards, "reward/long": 1000 * torch.from_numpy(rng.random(200))}
    outcomes = Outcomes(outcomes.rewards, outcomes.groups, outcomes.lengths, columns)
    estimator = RewardNormalized(("reward/right", "reward/long"), weights=(1.0, 0.5))
    total = np.zeros(200)
    for (name, column), weight in zip(columns.items(), (1.0, 0.5), strict=True):
        own = Outcomes(column, outcomes.groups, outcomes.lengths)
        assert name in estimator.reads
        total += weight * reference(group_normalized, own)
    expected = (total - total.mean()) / total.std(ddof=1)
    np.testing.assert_allclose(estimator(outcomes).numpy(), expected, atol=1e-4)
    with pytest.raises(UserError, match="one weight for each"):
        RewardNormalized(("a", "b"), weights=(1.0,))


def test_the_greedy_response_is_the_baseline():
    outcomes = Outcomes.of([1.0, 0.0, 2.0], groups=[0, 0, 1], baseline_reward=[0.5, 0.5, 2.0])
    assert greedy_baseline(outcomes).tolist() == [0.5, -0.5, 0.0]
    with pytest.raises(
        UserError, match="'baseline_reward', which its outcomes do not have; there are none"
    ):
        greedy_baseline(Outcomes.of([1.0], groups=[0]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_against_a_loop_over_groups(estimator):
    outcomes = random_outcomes()
    mine = estimator(outcomes).numpy()
    assert mine.dtype == np.float32
    np.testing.assert_allclose(mine, reference(estimator, outcomes), atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 1e8, -3.7])
def test_equal_rewards_and_single_rows_give_exact_zeros(estimator, reward: float):
    outcomes = Outcomes.of(torch.full((8,), reward), groups=[0] * 7 + [1], lengths=range(8))
    assert estimator(outcomes).tolist() == [0.0] * 8
    assert estimator(Outcomes.of(torch.tensor([]), groups=[])).tolist() == []


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_order_of_rows_and_a_constant_on_all_rewards_do_not_matter(estimator):
    torch.manual_seed(0)
    rewards, groups, lengths = torch.randn(64), torch.arange(64) % 8, torch.randint(1, 9, (64,))
    order = torch.randperm(64)
    plain = estimator(Outcomes.of(rewards, groups, lengths))
    torch.testing.assert_close(
        estimator(Outcomes.of(rewards[order], groups[order], lengths[order])), plain[order]
    )
    if estimator is not mean_normalized:  # divides by the mean
        torch.testing.assert_close(
            estimator(Outcomes.of(rewards + 5, groups, lengths)), plain, atol=1e-5, rtol=1e-5
        )
    names = torch.randperm(8)  # random group ids
    torch.testing.assert_close(estimator(Outcomes.of(rewards, names[groups], lengths)), plain)
    weights = lengths if estimator is length_weighted else torch.ones(64)
    sums = torch.zeros(8).index_add_(0, groups, plain * weights)
    assert (
        (sums >= 0).all() if estimator is best_of_group else sums.abs().max() < 1e-4
    )  # otherwise a group sums to zero


@pytest.mark.parametrize("estimator", WITHIN_A_GROUP)
def test_a_group_does_not_see_the_others(estimator):
    outcomes = random_outcomes()
    mine = outcomes.groups == 7
    alone = Outcomes.of(outcomes.rewards[mine], torch.zeros(int(mine.sum())), outcomes.lengths[mine])
    torch.testing.assert_close(estimator(alone), estimator(outcomes)[mine])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_empty_responses_do_no_harm(estimator):
    outcomes = Outcomes.of([1.0, 0.0, 1.0, 0.0], groups=[0, 0, 1, 1], lengths=[0, 0, 3, 0])
    assert estimator(outcomes).isfinite().all()


def test_every_token_of_a_response_gets_its_rows_advantage():
    samples = Batch.of(
        group_id=[9, 4, 9, 4], reward=[1, 5, 0, 5], response_ids=[[1, 2], [3], [4, 5, 6], []]
    )
    out = group_advantages(samples.slice(0, 4), estimator=group_centred)
    assert out["advantages"].to_pylist() == [[0.5, 0.5], [0.0], [-0.5, -0.5, -0.5], []]
    assert group_advantages(samples.slice(0, 0))["advantages"].to_pylist() == []
    assert group_advantages(samples.slice(1, 3), estimator=group_centred)["advantages"].to_pylist() == [
        [0.0],
        [0.0] * 3,
        [],
    ]


def test_lengths_are_of_trained_tokens_and_another_reward_can_be_compared():
    samples = Batch.of(
        group_id=[1, 1],
        shaped=[1.0, 0.0],
        response_ids=[[1, 2, 3, 4], [3]],
        response_mask=[[1, 0, 1, 1], [1]],
    )
    out = group_advantages(samples, estimator=length_weighted, reward="shaped")
    assert out["advantages"].to_pylist() == [[0.25, 0.0, 0.25, 0.25], [-0.75]]


def test_whitening_is_over_the_trained_tokens():
    samples = Batch.of(
        group_id=[1, 1], reward=[1.0, 0.0], response_ids=[[1, 2], [3, 4]], response_mask=[[1, 1], [1, 0]]
    )
    out = group_advantages(samples, estimator=group_centred, whiten=True)["advantages"].to_pylist()
    third = 3**-0.5  # 1/2, 1/2, -1/2: mean 1/6, variance 1/3
    assert out[0] == pytest.approx([third, third]) and out[1] == pytest.approx([-2 * third, 0.0])


def test_an_estimator_that_reads_a_column_is_checked_when_the_graph_is_recorded():
    @graph
    def training(samples):
        return group_advantages(samples, estimator=greedy_baseline)

    import pyarrow as pa

    rows = {"reward": [1.0], "response_ids": [[1]]}
    with pytest.raises(
        UserError, match="'group_advantages' reads column 'baseline_reward', which no node writes"
    ):
        training(TableSource("samples", pa.table(rows)))
    samples = Batch.of(
        group_id=[1, 1], reward=[1.0, 0.0], baseline_reward=[0.5, 0.5], response_ids=[[1, 2], [3]]
    )
    assert group_advantages(samples, estimator=greedy_baseline)["advantages"].to_pylist() == [
        [0.5, 0.5],
        [-0.5],
    ]
