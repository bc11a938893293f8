"""Credit for turns: numbers by hand, plain float64 references, and masks."""

import itertools

import numpy as np
import pytest
import torch

from weft.algorithms.advantages import greedy_baseline, group_advantages, group_centred, group_normalized
from weft.algorithms.loss import response_rows
from weft.algorithms.rewards import outcome_rewards, token_rewards
from weft.algorithms.turns import Turns, critic_turn_advantages, group_turn_advantages
from weft.algorithms.values import critic_advantages
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError


def random_turns(seed: int = 0, *, masked: float = 0.2) -> Batch:
    """Return rows with 1 to 4 turns of 1 to 3 sampled tokens, and given tokens before, between and
    after them. Some turns and some single sampled tokens are masked."""
    draw = np.random.default_rng(seed)
    columns: dict[str, list] = {
        name: [] for name in ("response_mask", "turn_ends", "turn_rewards", "token_rewards", "values")
    }
    for _ in range(24):
        mask: list[int] = []
        ends: list[int] = []
        for _ in range(draw.integers(1, 5)):
            mask += [0] * int(draw.integers(0, 3))
            kept = draw.random() > masked
            mask += [int(kept and draw.random() > masked) for _ in range(draw.integers(1, 4))]
            ends.append(len(mask))
        mask += [0] * int(draw.integers(0, 3))
        columns["response_mask"].append(mask)
        columns["turn_ends"].append(ends)
        columns["turn_rewards"].append(draw.integers(-2, 3, len(ends)).astype(np.float32))
        for name in ("token_rewards", "values"):
            columns[name].append(draw.standard_normal(len(mask)).astype(np.float32))
    of_row = draw.permutation(np.repeat(np.arange(16), [1, 2] * 8))
    return Batch.of(
        sample_id=draw.permutation(24) + 50,
        group_id=(np.arange(16) % 3)[of_row],
        episode_id=of_row * 3 - 20,
        reward=(draw.integers(0, 3, 16) / 2)[of_row],
        response_ids=[[1] * len(mask) for mask in columns["response_mask"]],
        **columns,
    )


def turns_of(mask: list[int], ends: list[int]) -> list[list[int]]:
    """The places of the trained tokens of each turn of a row."""
    starts = [0, *ends[:-1]]
    return [[t for t in range(start, end) if mask[t]] for start, end in zip(starts, ends, strict=True)]


# Generalized advantages over turns


def test_generalized_advantages_of_turns_by_hand():
    samples = Batch.of(
        token_rewards=[[-0.25, 0.25, 9.0, 1.0, 0.5, 9.0], [2.0]],
        values=[[0.5, 8.0, 9.0, 0.25, 8.0, 9.0], [1.0]],
        response_mask=[[1, 1, 0, 1, 1, 0], [1]],
        turn_ends=[[2, 5], [1]],
    )
    out = critic_turn_advantages(samples, gamma=0.5, lam=0.5, whiten=False)
    # Rewards 0 and 1.5; values 0.5 and 0.25; the delta of the first is 0 + 0.125 - 0.5.
    second = 1.5 - 0.25
    first = -0.375 + 0.25 * second
    expected = [[first, first, 0, second, second, 0], [1]]
    assert out["advantages"].to_pylist() == expected
    targets = [[first + 0.5] * 2 + [0] + [1.5] * 2 + [0], [2]]
    assert out["returns"].to_pylist() == targets


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.5, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_generalized_advantages_of_turns_against_the_recursion(seed: int, gamma: float, lam: float):
    samples = random_turns(seed)
    out = critic_turn_advantages(samples, gamma=gamma, lam=lam, whiten=False)
    for row, made in zip(samples.to_rows(), out.to_rows(), strict=True):
        advantages, returns = np.zeros(len(row["values"])), np.zeros(len(row["values"]))
        following = after = 0.0
        for places in turns_of(row["response_mask"], row["turn_ends"])[::-1]:
            if not places:
                continue
            value = row["values"][places[0]]
            reward = sum(row["token_rewards"][t] for t in places)
            after = reward + gamma * following - value + gamma * lam * after
            following = value
            advantages[places], returns[places] = after, after + value
        np.testing.assert_allclose(made["advantages"], advantages, atol=1e-5)
        np.testing.assert_allclose(made["returns"], returns, atol=1e-5)


def test_a_turn_of_one_token_is_a_step_of_the_token_recursion():
    samples = random_turns()
    per_token = samples.with_columns(
        turn_ends=[[*range(1, len(mask) + 1)] for mask in samples["response_mask"].to_pylist()]
    )
    for whiten in (True, False):
        mine = critic_turn_advantages(per_token, gamma=0.9, lam=0.8, whiten=whiten)
        expected = critic_advantages(samples, gamma=0.9, lam=0.8, whiten=whiten)
        for column in ("advantages", "returns"):
            torch.testing.assert_close(mine.ragged(column)[0], expected.ragged(column)[0])
    without = samples.select(("token_rewards", "values", "response_mask"))
    assert critic_turn_advantages(without, lam=0.8) == critic_advantages(without, lam=0.8)


def test_given_tokens_may_hold_anything_and_get_neither_advantage_nor_target():
    samples = random_turns()
    masks = samples["response_mask"].to_pylist()
    poisoned = samples.with_columns(
        **{
            name: [
                [v if kept else np.nan for v, kept in zip(values, mask, strict=True)]
                for values, mask in zip(samples[name].to_pylist(), masks, strict=True)
            ]
            for name in ("token_rewards", "values")
        }
    )
    for node in (critic_turn_advantages, critic_advantages):
        clean, dirty = node(samples), node(poisoned)
        for column in ("advantages", "returns"):
            assert clean[column] == dirty[column]
            given = np.concatenate(masks) == 0
            assert (dirty.ragged_numpy(column)[0][given] == 0).all()
            assert np.abs(dirty.ragged_numpy(column)[0][~given]).max() > 0


# Rewards of turns as token rewards


def test_the_reward_of_a_turn_is_at_its_last_trained_token():
    samples = Batch.of(
        response_ids=[[1] * 6, [1] * 2, [1] * 3],
        response_mask=[[1, 1, 0, 1, 0, 0], [0, 1], [0, 0, 0]],
        turn_ends=[[2, 5], [1, 2], [2]],
        turn_rewards=[[1.0, 2.0], [4.0, 8.0], [16.0]],
    )
    out = outcome_rewards(samples, reward="turn_rewards")["token_rewards"].to_pylist()
    # The first turn of the second row has no trained token before its end; the third row has none.
    assert out == [[0, 1, 0, 2, 0, 0], [0, 8], [0, 0, 0]]
    whole = samples.with_columns(turn_ends=[[6], [2], [3]], turn_rewards=[[3.0], [5.0], [7.0]])
    expected = outcome_rewards(samples.with_columns(reward=[3.0, 5.0, 7.0]))
    made = outcome_rewards(whole, reward="turn_rewards")
    assert made["token_rewards"] == expected["token_rewards"], "one turn is the whole response"


def test_the_reward_of_a_masked_turn_goes_to_the_turn_before_it():
    samples = Batch.of(
        response_ids=[[1] * 4],
        response_mask=[[1, 0, 0, 0]],
        turn_ends=[[1, 3]],
        turn_rewards=[[1.0, 2.0]],
    )
    out = outcome_rewards(samples, reward="turn_rewards")
    assert out["token_rewards"].to_pylist() == [[3.0, 0.0, 0.0, 0.0]]


def test_a_penalty_and_the_rewards_of_turns_add_up():
    samples = Batch.of(
        turn_rewards=[[1.0, 2.0]],
        turn_ends=[[1, 3]],
        response_mask=[[1, 0, 1]],
        response_logprobs=[[-1.0, np.nan, -1.0]],
        reference_logprobs=[[-1.5, 0.0, -1.0]],
    )
    out = token_rewards(samples, coefficient=0.5, reward="turn_rewards")
    assert out["token_rewards"].to_pylist() == [[0.75, 0.0, 2.0]]


# Group credit


def test_group_credit_of_turns_by_hand():
    samples = Batch.of(
        group_id=[7, 7, 7],
        reward=[1.0, 0.0, 0.5],
        response_ids=[[1] * 4, [1] * 2, [1] * 3],
        response_mask=[[1, 0, 1, 1], [1, 1], [1, 0, 1]],
        turn_ends=[[1, 4], [2], [1, 3]],
        turn_rewards=[[1.0, 2.0], [-1.0], [0.0, 1.0]],
    )
    out = group_turn_advantages(samples, estimator=group_centred, gamma=0.5, turn_weight=2.0)
    # Returns of the first turn: 2, -1 and 0.5, mean 0.5; of the second: 2 and 1, mean 1.5.
    assert out["advantages"].to_pylist() == [
        [0.5 + 2 * 1.5, 0, 0.5 + 2 * 0.5, 0.5 + 2 * 0.5],
        [-0.5 - 2 * 1.5] * 2,
        [0, 0, 0 - 2 * 0.5],
    ]
    outcome = group_turn_advantages(samples, estimator=group_normalized, turn_weight=0.0)
    expected = group_advantages(samples, estimator=group_normalized)
    assert outcome["advantages"] == expected["advantages"], "without a weight, only the outcome counts"


@pytest.mark.parametrize("seed", range(3))
def test_group_credit_of_turns_against_loops(seed: int):
    samples = random_turns(seed)
    rows = samples.to_rows()
    order = np.argsort([row["sample_id"] for row in rows])
    # Each episode's turns: (row, places of its trained tokens, reward), through its rows.
    episodes: dict[int, list[tuple[int, list[int], float]]] = {}
    for k in order.tolist():
        places = turns_of(rows[k]["response_mask"], rows[k]["turn_ends"])
        turns = zip(itertools.repeat(k), places, rows[k]["turn_rewards"])
        episodes.setdefault(rows[k]["episode_id"], []).extend(turns)
    group_of = {row["episode_id"]: (row["group_id"], row["reward"]) for row in rows}
    voting = {e: turns for e, turns in episodes.items() if any(places for _, places, _ in turns)}
    returns = {
        (e, n): sum(0.9 ** (j - n) * turns[j][2] for j in range(n, len(turns)))
        for e, turns in voting.items()
        for n in range(len(turns))
    }
    expected = [np.zeros(len(row["response_ids"])) for row in rows]

    def centred(value: float, others: list[float]) -> float:
        return value - sum(others) / len(others)

    for e, turns in voting.items():
        group, reward = group_of[e]
        peers = [f for f in voting if group_of[f][0] == group]
        for n, (k, places, _) in enumerate(turns):
            if not places:
                continue
            same = [returns[f, n] for f in peers if n < len(voting[f]) and voting[f][n][1]]
            outcome = centred(reward, [group_of[f][1] for f in peers])
            expected[k][places] = outcome + 0.5 * centred(returns[e, n], same)
    made = group_turn_advantages(samples, estimator=group_centred, gamma=0.9, turn_weight=0.5)
    for mine, wanted in zip(made["advantages"].to_pylist(), expected, strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5)
    shuffled = samples.take(np.random.default_rng(seed).permutation(len(samples)))
    again = group_turn_advantages(shuffled, estimator=group_centred, gamma=0.9, turn_weight=0.5)
    by_id = dict(zip(again["sample_id"].to_pylist(), again["advantages"].to_pylist(), strict=True))
    for id, wanted in zip(samples["sample_id"].to_pylist(), expected, strict=True):
        np.testing.assert_allclose(by_id[id], wanted, atol=1e-5)


def test_turns_are_numbered_through_the_rows_of_an_episode():
    """A compacted context starts a second row: its reward also belongs to the turns of the first."""
    samples = Batch.of(
        sample_id=[12, 11, 13],
        group_id=[7, 7, 7],
        episode_id=[1, 1, 2],
        reward=[0.0, 0.0, 0.0],
        response_ids=[[1], [1], [1, 1]],
        response_mask=[[1], [1], [1, 1]],
        turn_ends=[[1], [1], [1, 2]],
        turn_rewards=[[4.0], [0.0], [0.0, 2.0]],
    )
    out = group_turn_advantages(samples, estimator=group_centred)["advantages"].to_pylist()
    assert out == [[1.0], [1.0], [-1.0, -1.0]], "returns 4, 4 against 2, 2"
    assert len(group_turn_advantages(samples.slice(0, 0))) == 0


def test_whitened_group_credit_has_mean_zero_over_the_trained_tokens():
    samples = random_turns()
    out = group_turn_advantages(samples, whiten=True).ragged_numpy("advantages")[0]
    trained = samples.ragged_numpy("response_mask")[0] > 0
    assert abs(out[trained].mean()) < 1e-6 and abs(out[trained].std(ddof=1) - 1) < 1e-5
    assert (out[~trained] == 0).all()


# Errors


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([3, 2], r"sample 9 has turn_ends \[3, 2\] and a response of 3 tokens"),
        ([4], r"sample 9 has turn_ends \[4\]"),
        ([2], "no trained token may follow the last one"),
        ([], r"sample 9 has turn_ends \[\]"),
    ],
)
def test_turn_ends_that_do_not_fit_the_response_are_refused(ends: list[int], message: str):
    samples = Batch.of(
        sample_id=[8, 9, 10], response_ids=[[1], [1, 2, 3], [1]], turn_ends=[[1], ends, [1]]
    )
    with pytest.raises(UserError, match=message):
        Turns.of(samples, response_rows(samples, "response_ids"))


def test_rewards_that_do_not_fit_the_turns_and_an_estimator_of_columns_are_refused():
    samples = Batch.of(
        group_id=[7], reward=[1.0], response_ids=[[1]], turn_ends=[[1]], turn_rewards=[[1.0, 2.0]]
    )
    with pytest.raises(UserError, match="row 0 has 2 turn_rewards and 1 turns"):
        group_turn_advantages(samples)
    with pytest.raises(UserError, match="the estimator reads baseline_reward"):
        group_turn_advantages(samples, estimator=greedy_baseline)
    with pytest.raises(UserError, match="gamma must be between 0 and 1"):
        critic_turn_advantages(random_turns(), gamma=1.5)
    with pytest.raises(UserError, match="lam must be between 0 and 1"):
        critic_turn_advantages(random_turns(), lam=-1.0)
