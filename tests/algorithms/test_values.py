"""Values: numbers by hand, a plain float64 recursion, and invariance under padding, masks and
packing."""

import itertools

import numpy as np
import pytest
import torch

from weft.algorithms.aggregation import sequence_mean
from weft.algorithms.loss import Loss, PackedRows
from weft.algorithms.values import (
    LengthAdaptive,
    ValueLoss,
    critic_advantages,
    discounted_returns,
    generalized_advantages,
    return_advantages,
    whitened,
)
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError


def random_rows(
    lengths: list[int], *, mask: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, PackedRows]:
    torch.manual_seed(0)
    num_tokens = sum(lengths)
    columns = {} if mask is None else {"response_mask": (torch.rand(num_tokens) < mask).to(torch.uint8)}
    return torch.randn(num_tokens), torch.randn(num_tokens), PackedRows.of(lengths, **columns)


def reference(
    rewards, values, rows: PackedRows, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the paper's recursion, backwards over the trained tokens of each row."""
    r, v, mask = (t.double().numpy() for t in (rewards, values, rows.trained))
    advantages, returns = np.zeros(len(r)), np.zeros(len(r))
    for start, end in zip(rows.cu_seqlens[:-1].tolist(), rows.cu_seqlens[1:].tolist(), strict=True):
        following = after = 0.0
        for t in [t for t in range(start, end) if mask[t]][::-1]:
            after = r[t] + gamma * following - v[t] + gamma * lam * after
            following = v[t]
            advantages[t], returns[t] = after, after + v[t]
    return advantages, returns


def test_generalized_advantages_by_hand():
    rewards, values = torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.tensor([0.5, 0.25, 0.75, 1.0])
    advantages, returns = generalized_advantages(
        rewards, values, PackedRows.of([3, 1]), gamma=0.5, lam=0.5
    )
    # deltas: 0 + 0.125 - 0.5, 0 + 0.375 - 0.25, 1 - 0.75; 2 - 1
    last, middle = 0.25, 0.125 + 0.25 * 0.25
    assert advantages.tolist() == pytest.approx([-0.375 + 0.25 * middle, middle, last, 1.0])
    assert returns.tolist() == pytest.approx([0.5 - 0.375 + 0.25 * middle, 0.25 + middle, 1.0, 2.0])


@pytest.mark.parametrize(
    "lengths",
    [
        [3, 1, 0, 5],
        [31, 32, 33, 64, 65],
        [0],
        [],
        [0, 0, 7, 0],
        [1500, 3, 1024, 2000],
        [50_000, 0, 40_000, 3],
    ],
)
@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (1.0, 0.0), (0.0, 0.5), (0.5, 0.1)]
)
@pytest.mark.parametrize("mask", [None, 0.7, 0.0])
def test_generalized_advantages_against_the_recursion(
    lengths, gamma: float, lam: float, mask: float | None
):
    rewards, values, rows = random_rows(lengths, mask=mask)
    mine = generalized_advantages(rewards, values, rows, gamma=gamma, lam=lam)
    for each, expected in zip(mine, reference(rewards, values, rows, gamma, lam), strict=True):
        assert each.dtype == torch.float32
        np.testing.assert_allclose(
            each.numpy(), expected, atol=1e-5 * max(1, np.abs(expected).max(initial=0))
        )


@pytest.mark.parametrize("lengths", [[3, 1, 0, 5, 60], [0], [], [31, 32, 33, 2000]])
@pytest.mark.parametrize("mask", [None, 0.7, 0.0])
def test_a_length_adaptive_lam_is_that_of_each_row(lengths: list[int], mask: float | None):
    rewards, values, rows = random_rows(lengths, mask=mask)
    mine = generalized_advantages(rewards, values, rows, gamma=0.99, lam=LengthAdaptive(alpha=0.2))
    expected = [np.zeros(sum(lengths)) for _ in range(2)]
    ends = rows.cu_seqlens.tolist()
    for a, b in itertools.pairwise(ends):
        columns = {"response_mask": rows["response_mask"][a:b]} if mask is not None else {}
        own = PackedRows.of([b - a], **columns)
        trained = float(own.trained.sum())
        lam = max(0.0, 1 - 1 / (0.2 * trained)) if trained else 0.0
        of_row = reference(rewards[a:b], values[a:b], own, 0.99, lam)
        for out, each in zip(expected, of_row, strict=True):
            out[a:b] = each
    for each, wanted in zip(mine, expected, strict=True):
        np.testing.assert_allclose(
            each.numpy(), wanted, atol=1e-5 * max(1, np.abs(wanted).max(initial=0))
        )


def test_the_critic_may_have_a_lam_of_its_own():
    """VAPO: targets without bias, advantages that adapt to the length."""
    columns = {"token_rewards": [[0.0, 0.0, 1.0], [2.0]], "values": [[0.5, 0.25, 0.5], [1.0]]}
    samples = Batch.of(response_ids=[[5, 6, 7], [8]], **columns)
    adaptive = LengthAdaptive(alpha=2 / 3)  # 1 - 1 / 2 for three tokens, and 0 for one
    found = critic_advantages(samples, lam=adaptive, value_lam=1.0, whiten=False)
    assert found["returns"].to_pylist() == [[1.0, 1.0, 1.0], [2.0]]
    assert found["advantages"].to_pylist()[1] == [1.0]
    # deltas: 0.25 - 0.5, 0.5 - 0.25 and 1 - 0.5
    assert found["advantages"].to_pylist()[0] == pytest.approx([-0.25 + 0.5 * 0.5, 0.25 + 0.25, 0.5])
    same = critic_advantages(samples, lam=0.5, value_lam=0.5, whiten=False)
    assert same == critic_advantages(samples, lam=0.5, whiten=False)
    with pytest.raises(UserError, match="alpha must be above 0, not 0"):
        LengthAdaptive(alpha=0)


@pytest.mark.parametrize("mask", [None, 0.7])
@pytest.mark.parametrize("part", [1, 40, 100])
def test_rows_are_worked_on_in_parts_that_know_nothing_of_each_other(
    monkeypatch: pytest.MonkeyPatch, mask: float | None, part: int
):
    monkeypatch.setattr("weft.algorithms.values._PART", part)
    rewards, values, rows = random_rows([0, 70, 3, 0, 33, 200, 1, 0], mask=mask)
    mine = generalized_advantages(rewards, values, rows, gamma=0.99, lam=0.9)
    for each, expected in zip(mine, reference(rewards, values, rows, 0.99, 0.9), strict=True):
        np.testing.assert_allclose(each.numpy(), expected, atol=1e-5)
    if mask is None:
        returns = discounted_returns(rewards, rows, gamma=0.99)
        np.testing.assert_allclose(
            returns.numpy(), reference(rewards, 0 * values, rows, 0.99, 1.0)[1], atol=1e-4
        )


def test_two_estimates_that_need_no_recursion():
    rewards, values, rows = random_rows([40, 3, 100])
    _, monte_carlo = generalized_advantages(rewards, values, rows, gamma=1.0, lam=1.0)
    torch.testing.assert_close(monte_carlo, discounted_returns(rewards, rows))
    later = torch.stack(
        [values[t + 1] if t + 1 not in (40, 43, 143) else torch.tensor(0.0) for t in range(143)]
    )
    one_step, _ = generalized_advantages(rewards, values, rows, gamma=0.9, lam=0.0)
    torch.testing.assert_close(one_step, rewards + 0.9 * later - values)


def test_masked_tokens_are_passed_over_and_may_hold_anything():
    rewards, values, rows = random_rows([5, 80, 2, 40], mask=0.6)
    trained = rows.trained > 0
    poison = torch.where(trained, 0.0, torch.nan)
    mine = generalized_advantages(rewards + poison, values + poison, rows)
    short = PackedRows.of(rows.trained_lengths.long())
    alone = generalized_advantages(rewards[trained], values[trained], short)
    for with_mask, without in zip(mine, alone, strict=True):
        assert torch.equal(with_mask[trained], without) and (with_mask[~trained] == 0).all()


def test_padding_and_the_order_of_rows_change_nothing():
    lengths = [70, 3, 33, 1]
    rewards, values, rows = random_rows(lengths)
    plain, _ = generalized_advantages(rewards, values, rows)
    parts = dict(enumerate(torch.arange(sum(lengths)).split(lengths)))
    order = torch.cat([parts[k] for k in (2, 0, 3, 1)])
    shuffled, _ = generalized_advantages(rewards[order], values[order], PackedRows.of([33, 70, 1, 3]))
    torch.testing.assert_close(shuffled, plain[order])
    real = torch.cat([torch.arange(100) < n for n in lengths])
    rectangle, _ = generalized_advantages(
        torch.zeros(400).masked_scatter(real, rewards),
        torch.zeros(400).masked_scatter(real, values),
        PackedRows.of([100] * 4, response_mask=real),
    )
    torch.testing.assert_close(rectangle[real], plain)


def test_the_inputs_are_left_as_they_are():
    rewards, values, rows = random_rows([70, 3])
    before = rewards.clone(), values.clone()
    generalized_advantages(rewards, values, rows)
    discounted_returns(rewards, rows)
    whitened(values, rows)
    assert torch.equal(rewards, before[0]) and torch.equal(values, before[1])


def test_the_ends_of_the_range_of_a_discount_are_in_it():
    rewards, values = torch.tensor([1.0, 2.0]), torch.tensor([0.25, 0.5])
    rows = PackedRows.of([2])
    assert discounted_returns(rewards, rows, gamma=0.0).tolist() == [1.0, 2.0]
    assert discounted_returns(rewards, rows, gamma=1.0).tolist() == [3.0, 2.0]
    assert generalized_advantages(rewards, values, rows, gamma=0.0, lam=0.0)[0].tolist() == [0.75, 1.5]


def test_a_discount_outside_its_range_is_named():
    rewards, values, rows = random_rows([3])
    with pytest.raises(
        UserError, match=r"generalized_advantages: lam must be between 0 and 1, not 1\.5"
    ):
        generalized_advantages(rewards, values, rows, lam=1.5)
    with pytest.raises(UserError, match=r"discounted_returns: gamma must be between 0 and 1, not -0\.1"):
        discounted_returns(rewards, rows, gamma=-0.1)


def test_whitening_by_hand_and_at_the_edges():
    rows = PackedRows.of([2, 3], response_mask=[1, 1, 0, 1, 0])
    values = torch.tensor([1.0, 2.0, torch.nan, 6.0, torch.inf])  # mean 3, variance 7
    assert whitened(values, rows).tolist() == pytest.approx([-2 / 7**0.5, -1 / 7**0.5, 0, 3 / 7**0.5, 0])
    assert whitened(values, rows, shift=False).tolist() == pytest.approx(
        [3 - 2 / 7**0.5, 3 - 1 / 7**0.5, 0, 3 + 3 / 7**0.5, 0]
    )
    for equal in (torch.full((5,), 0.1), torch.full((5,), 1e8)):
        assert whitened(equal, PackedRows.of([5])).tolist() == [0.0] * 5
        assert whitened(equal, PackedRows.of([5]), shift=False).tolist() == pytest.approx(equal.tolist())
    assert whitened(values[:1], PackedRows.of([1])).tolist() == [0.0]
    assert whitened(values, PackedRows.of([5], response_mask=[0] * 5)).tolist() == [0.0] * 5
    assert whitened(torch.tensor([]), PackedRows.of([])).tolist() == []


def test_whitened_values_have_mean_zero_and_deviation_one_far_from_zero():
    torch.manual_seed(0)
    values = 1000 + torch.randn(100_000)
    out = whitened(values, PackedRows.of([100_000])).double()
    assert abs(out.mean()) < 1e-5 and abs(out.std() - 1) < 1e-5


def test_the_nodes_write_the_declared_columns():
    samples = Batch.of(
        token_rewards=[[0.0, 9.0, 1.0], [2.0]],
        values=[[0.5, 9.0, 0.5], [1.0]],
        response_mask=[[1, 0, 1], [1]],
    )
    out = critic_advantages(samples, gamma=1.0, lam=1.0, whiten=False)
    assert out["advantages"].to_pylist() == [[0.5, 0.0, 0.5], [1.0]]
    assert out["returns"].to_pylist() == [[1.0, 0.0, 1.0], [2.0]]
    third = 3**-0.5  # mean 2/3, variance 1/12
    white = critic_advantages(samples, gamma=1.0, lam=1.0)["advantages"].to_pylist()
    assert white[0] == pytest.approx([-third, 0.0, -third]) and white[1] == pytest.approx([2 * third])
    assert return_advantages(samples, whiten=False)["advantages"].to_pylist() == [[1.0, 0.0, 1.0], [2.0]]
    assert return_advantages(samples.slice(1, 1))["advantages"].to_pylist() == [[0.0]]
    assert critic_advantages(samples.slice(0, 0))["returns"].to_pylist() == []


# The critic's loss


def test_the_value_loss_by_hand():
    rows = PackedRows.of([4], values=[0.0, 0.0, 0.0, 0.0], returns=[1.0, 1.0, -1.0, 0.1])
    values = torch.tensor([0.5, 0.1, 0.5, -0.1], requires_grad=True)
    # The first would gain beyond 0.2: (0.2 - 1)^2. The third moved the wrong way, so its own error
    # is larger than the clipped one.
    loss, metrics = ValueLoss(clip=0.2)(values, rows)
    assert loss.item() == pytest.approx((0.64 + 0.81 + 2.25 + 0.04) / 2)
    assert torch.autograd.grad(loss, values)[0].tolist() == pytest.approx([0.0, -0.9, 1.5, -0.2])
    found = {name: metric.value for name, metric in metrics.items()}
    assert found == pytest.approx({"value": 0.25, "return": 0.275, "clip_fraction": 0.25})
    plain, _ = ValueLoss(clip=None)(values, rows)
    assert plain.item() == pytest.approx((0.25 + 0.81 + 2.25 + 0.04) / 2)
    assert ValueLoss(clip=None).reads == ("returns",) and ValueLoss().reads == ("values", "returns")


@pytest.mark.parametrize(
    "loss", [ValueLoss(), ValueLoss(clip=None), ValueLoss(clip=0.5, aggregation=sequence_mean)]
)
def test_the_value_loss_masks_and_adds_up(loss: ValueLoss):
    assert isinstance(loss, Loss)
    torch.manual_seed(0)
    lengths, mask = [3, 0, 4, 2], torch.tensor([1, 0, 1, 1, 1, 0, 1, 0, 0])
    old, returns, values = torch.randn(3, 9)
    values.requires_grad_()
    whole, _ = loss(values, PackedRows.of(lengths, values=old, returns=returns, response_mask=mask))
    poison = torch.where(mask == 1, 0.0, torch.nan)
    rows = PackedRows.of(lengths, values=old + poison, returns=returns + poison, response_mask=mask)
    dirty, metrics = loss(values, rows)
    assert dirty.item() == whole.item() and all(m.value == m.value for m in metrics.values())
    (gradient,) = torch.autograd.grad(dirty, values)
    assert gradient.isfinite().all() and (gradient[mask == 0] == 0).all() and gradient.abs().max() > 0
    parts = [
        (loss(values[a:b], part)[0], loss.count(part))
        for a, b, n in [(0, 3, [3, 0]), (3, 9, [4, 2])]
        for part in [PackedRows.of(n, values=old[a:b], returns=returns[a:b], response_mask=mask[a:b])]
    ]
    torch.testing.assert_close(sum(part for part, _ in parts), whole)
    assert sum(count for _, count in parts) == loss.count(rows)
    nothing = PackedRows.of([2], values=[1.0, 1.0], returns=[0.0, 0.0], response_mask=[0, 0])
    assert loss(values[:2], nothing)[0].item() == 0
