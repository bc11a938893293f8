"""Aggregations: means over tokens, rows and episodes, however rows are split."""

import numpy as np
import pytest
import torch

from weft.algorithms.aggregation import AggregatedLoss, FixedLength, episode_mean, sequence_mean
from weft.algorithms.loss import PackedRows
from weft.algorithms.policy_loss import NegativeLogLikelihood, PolicyLoss
from weft.algorithms.values import ValueLoss


def random_rows(seed: int = 0) -> tuple[torch.Tensor, PackedRows, np.ndarray]:
    """Return log-probabilities, packed rows of 12 episodes in random order, and the episode of each
    row. Some tokens, rows and episodes are masked."""
    draw = np.random.default_rng(seed)
    of_row = draw.permutation(np.repeat(np.arange(12), draw.integers(1, 5, 12)))
    lengths = draw.integers(0, 6, len(of_row))
    row_of_token = np.repeat(np.arange(len(of_row)), lengths)
    mask = (draw.random(lengths.sum()) < 0.7) & (draw.random(len(of_row)) < 0.8)[row_of_token]
    mask &= of_row[row_of_token] != 3
    tokens = np.bincount(of_row[row_of_token], weights=mask, minlength=12).astype(np.int32)
    rows = PackedRows.of(
        torch.from_numpy(lengths),
        response_mask=mask.astype(np.uint8),
        episode_tokens=tokens[of_row],
    )
    return torch.from_numpy(-draw.random(len(mask))), rows, of_row


def part_of(rows: PackedRows, index: np.ndarray) -> tuple[torch.Tensor, PackedRows]:
    """Return the places of some rows' tokens, and these rows."""
    starts = rows.cu_seqlens.numpy()
    places = np.arange(rows.num_tokens)
    tokens = np.concatenate([places[:0], *(places[starts[k] : starts[k + 1]] for k in index)])
    return torch.from_numpy(tokens), PackedRows.of(
        rows.lengths[index],
        response_mask=rows["response_mask"][tokens],
        episode_tokens=rows["episode_tokens"][index],
    )


def expected_mean(values: torch.Tensor, rows: PackedRows, of_row: np.ndarray) -> float:
    """The mean over episodes of the mean over their trained tokens, in float64."""
    values_T, trained = values.numpy(), rows.trained.numpy() > 0
    episode_of_token = of_row[rows.row_of_token.numpy()]
    means = [
        values_T[trained & (episode_of_token == e)].mean() for e in np.unique(episode_of_token[trained])
    ]
    return float(np.mean(means))


def test_the_mean_over_episodes_by_hand():
    # One episode of two rows with the losses 1, 2 and 6; another with 5 and a masked token.
    rows = PackedRows.of([2, 1, 2], response_mask=[1, 1, 1, 0, 1], episode_tokens=[3, 3, 1])
    losses = torch.tensor([1.0, 2.0, 6.0, 100.0, 5.0])
    assert episode_mean.count(rows) == 2
    mean = (episode_mean.weights(rows) * losses).sum() / episode_mean.count(rows)
    assert mean.item() == pytest.approx((3 + 5) / 2)
    per_row = (sequence_mean.weights(rows) * losses).sum() / sequence_mean.count(rows)
    assert per_row.item() == pytest.approx((1.5 + 6 + 5) / 3)


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_over_episodes_is_exact_however_rows_are_split(seed: int):
    logprobs, rows, of_row = random_rows(seed)
    loss = NegativeLogLikelihood(aggregation=episode_mean)
    whole = loss(logprobs, rows)[0].item() / loss.count(rows)
    assert whole == pytest.approx(expected_mean(-logprobs, rows, of_row), rel=1e-6)
    # Ranks and microbatches split the rows anywhere, also within an episode.
    draw = np.random.default_rng(seed)
    cuts = np.sort(draw.integers(0, len(of_row) + 1, 6))
    parts = [part_of(rows, index) for index in np.split(draw.permutation(len(of_row)), cuts)]
    total = sum(loss(logprobs[tokens], part)[0].item() for tokens, part in parts)
    count = sum(loss.count(part) for _, part in parts)
    num_episodes = len(np.unique(of_row[(rows.trained_lengths > 0).numpy()]))
    assert count == pytest.approx(num_episodes, rel=1e-12)
    assert total / count == pytest.approx(whole, rel=1e-6)


def test_an_episode_with_missing_rows_counts_as_the_share_that_is_left():
    rows = PackedRows.of([1, 2], episode_tokens=[4, 2])  # three tokens of the first are elsewhere
    assert episode_mean.count(rows) == pytest.approx(1.25)
    mean = (episode_mean.weights(rows) * torch.tensor([2.0, 1.0, 1.0])).sum() / 1.25
    assert mean.item() == pytest.approx((0.25 * 2 + 1) / 1.25), "a weighted mean of what is there"


def test_without_episodes_each_row_is_one():
    _, rows, _ = random_rows()
    plain = PackedRows(rows.cu_seqlens, {"response_mask": rows["response_mask"]})
    assert torch.equal(episode_mean.weights(plain), sequence_mean.weights(plain))
    assert episode_mean.count(plain) == sequence_mean.count(plain)
    nothing = PackedRows.of([2, 0], response_mask=[0, 0], episode_tokens=[0, 0])
    assert episode_mean.weights(nothing).tolist() == [0, 0] and episode_mean.count(nothing) == 0


@pytest.mark.parametrize("loss", [PolicyLoss, NegativeLogLikelihood, ValueLoss])
def test_a_loss_reads_the_columns_of_its_aggregation(loss: type[AggregatedLoss]):
    assert "episode_tokens" in loss(aggregation=episode_mean).may_read
    for other in (sequence_mean, FixedLength(8)):
        assert loss(aggregation=other).may_read == loss().may_read
    assert "episode_tokens" not in loss().may_read
