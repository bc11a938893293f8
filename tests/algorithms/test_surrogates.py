"""Surrogates: numbers and gradients by hand, and common values for an unchanged policy."""

import math
import pickle
from typing import Any

import pytest
import torch

from weft.algorithms.aggregation import sequence_mean
from weft.algorithms.loss import PackedRows
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.surrogates import (
    Cispo,
    Clipped,
    Dppo,
    GeometricRatio,
    PlainPolicyGradient,
    Sapo,
    Surrogate,
    Unclipped,
    Vespo,
    sequence_product,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
)
from weft.dataflow.errors import UserError

SURROGATES = [
    *(Clipped(), Clipped(high=0.28), Clipped(dual=3.0), Cispo(), Sapo(), PlainPolicyGradient()),
    *(Vespo(), Dppo(), Dppo(low=0.1, penalty=0.01)),
]


def losses_and_gradients(surrogate: Surrogate, ratios: list[float], advantages: list[float]):
    """Return losses and gradients for tokens with these ratios to a policy of log-probability
    -1."""
    logprobs = (torch.tensor(ratios, dtype=torch.float64).log() - 1).requires_grad_()
    losses, clipped = surrogate(
        (logprobs + 1).exp(), logprobs, torch.tensor(advantages, dtype=torch.float64)
    )
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses.tolist(), gradient.tolist(), clipped.tolist()


def test_clipping_by_hand():
    losses, gradients, clipped = losses_and_gradients(
        Clipped(low=0.2, high=0.28), [0.5, 0.5, 1.5, 1.5, 1.1], [1.0, -1.0, 1.0, -1.0, 2.0]
    )
    assert losses == pytest.approx([-0.5, 0.8, -1.28, 1.5, -2.2])
    assert gradients == pytest.approx([-0.5, 0, 0, 1.5, -2.2])  # -r A where it is not clipped
    assert clipped == [False, True, True, False, False]


def test_dual_clipping_bounds_the_loss_of_a_negative_advantage_alone():
    losses, gradients, clipped = losses_and_gradients(
        Clipped(dual=3.0), [10.0, 10.0, 2.5], [-2.0, 2.0, -2.0]
    )
    assert losses == pytest.approx([6.0, -2.4, 5.0])
    assert gradients == pytest.approx([0.0, 0.0, 5.0])
    assert clipped == [True, True, False]


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    losses, gradients, clipped = losses_and_gradients(
        Cispo(low=0.5, high=1.0), [8.0, 0.25, 1.5], [1.0, -1.0, 1.0]
    )
    # -clip(r) A, where PPO would give 0, 0 and 0
    assert gradients == pytest.approx([-2.0, 0.5, -1.5])
    assert losses == pytest.approx(
        [-2 * (math.log(8) - 1), 0.5 * (math.log(0.25) - 1), -1.5 * (math.log(1.5) - 1)]
    )
    assert clipped == [True, True, False]


def test_the_gate_of_sapo_by_hand():
    losses, gradients, clipped = losses_and_gradients(
        Sapo(temperatures=(2.0, 4.0)), [1.5, 1.5], [1.0, -1.0]
    )
    up, down = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    assert losses == pytest.approx([-2 * up, 1 * down])
    assert gradients == pytest.approx([-1.5 * 4 * up * (1 - up), 1.5 * 4 * down * (1 - down)])
    assert clipped == [False, False]


def test_the_geometric_mean_of_clipped_ratios_by_hand():
    """Tokens beyond the bound on the side that their advantage exploits have no gradient."""
    log_ratio = torch.tensor([0.6, 0.1, -0.6, -0.1], dtype=torch.float64, requires_grad=True)
    rows = PackedRows.of([2, 2], advantages=[1.0, 1.0, -1.0, -1.0])
    ratio = GeometricRatio(low=0.3, high=0.4)(log_ratio, rows)
    assert ratio.tolist() == pytest.approx([0.25, 0.25, -0.2, -0.2])
    (gradient,) = torch.autograd.grad(ratio.sum(), log_ratio)
    assert gradient.tolist() == [0, 1, 0, 1]
    wrong_side = GeometricRatio()(
        torch.tensor([-9.0, 9.0]), PackedRows.of([1, 1], advantages=[1.0, -1.0])
    )
    assert wrong_side.tolist() == [-9, 9]


def test_gspo_by_token_is_gspo_with_equal_advantages():
    torch.manual_seed(0)
    logprobs = torch.randn(7, dtype=torch.float64, requires_grad=True)
    columns = {
        "advantages": torch.tensor([1.0, 1, 1, -2, -2, 0.5, 0.5]),
        "response_mask": [1, 0, 1, 1, 1, 1, 1],
    }
    rows = PackedRows.of([3, 2, 2], **columns, old_logprobs=logprobs.detach() + 0.01 * torch.randn(7))
    found = []
    for ratio in (sequence_ratio, sequence_token_ratio):
        loss = PolicyLoss(
            ratio=ratio, old="old_logprobs", aggregation=sequence_mean, surrogate=Unclipped()
        )
        value, _ = loss(logprobs, rows)
        found.append((value.detach(), torch.autograd.grad(value, logprobs)[0]))
    torch.testing.assert_close(found[0], found[1])


def test_vespo_weighs_the_log_likelihood_by_the_ratio_of_the_response():
    """Compare with the paper's kernel by row, in plain Python."""
    torch.manual_seed(0)
    lengths, mask = [3, 2, 4], [1, 0, 1, 1, 1, 1, 1, 1, 1]
    old = torch.randn(9, dtype=torch.float64) - 2
    logprobs = (old + 0.4 * torch.randn(9, dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([1.5] * 3 + [-0.5] * 2 + [0.0] * 4, dtype=torch.float64)
    columns = {"old_logprobs": old, "advantages": advantages, "response_mask": mask}
    loss = PolicyLoss(old="old_logprobs", ratio=sequence_product, surrogate=Vespo(negative=(3.5, 1.5)))
    total, metrics = loss(logprobs, PackedRows.of(lengths, **columns))
    expected, start = torch.zeros((), dtype=torch.float64), 0
    for length in lengths:
        tokens = [t for t in range(start, start + length) if mask[t]]
        w = math.exp(sum((logprobs[t] - old[t]).item() for t in tokens))
        k, rate = (3.5, 1.5) if advantages[start] < 0 else (2.0, 3.0)
        weight = w**k * math.exp(rate * (1 - w))
        expected = expected - sum(weight * advantages[t] * logprobs[t] for t in tokens)
        start += length
    torch.testing.assert_close(total, expected)
    [mine], [theirs] = (torch.autograd.grad(value, logprobs) for value in (total, expected))
    torch.testing.assert_close(mine, theirs)
    assert metrics["clip_fraction"].value == 0


def test_the_weights_of_vespo_vanish_on_both_sides_without_overflow():
    _, gradients, _ = losses_and_gradients(Vespo(), [1e-12, math.exp(20)], [1.0, -1.0])
    assert gradients == pytest.approx([0.0, 0.0], abs=1e-20)


def test_dppo_masks_by_the_difference_of_probabilities_by_hand():
    old, new = [0.01, 0.5, 0.9, 0.9, 0.5], [0.2, 0.75, 0.6, 0.6, 0.75]
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    logprobs = torch.tensor(new, dtype=torch.float64).log().requires_grad_()
    ratio = (logprobs - torch.tensor(old, dtype=torch.float64).log()).exp()
    losses, masked = Dppo(low=0.25, high=0.2, penalty=0.1)(ratio, logprobs, advantages)
    # Up by 0.19, and by 0.25; down by 0.3; and twice against the advantage.
    assert masked.tolist() == [False, True, True, False, False]
    logs = [math.log(q / p) for p, q in zip(old, new, strict=True)]
    surrogate = [-20.0, 0.0, 0.0, -2 / 3, 1.5]
    assert losses.tolist() == pytest.approx(
        [s + 0.1 * d * d for s, d in zip(surrogate, logs, strict=True)]
    )
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert gradient.tolist() == pytest.approx(
        [s + 0.2 * d for s, d in zip(surrogate, logs, strict=True)]
    )


def test_dppo_is_finite_for_a_token_that_the_policy_has_ruled_out():
    losses, gradients, _ = losses_and_gradients(Dppo(), [0.0], [1.0])
    assert losses == [0.0] and gradients == [0.0]


def test_log_likelihood_ignores_the_ratio():
    assert losses_and_gradients(PlainPolicyGradient(), [math.e, 100.0], [2.0, -1.0])[1] == pytest.approx(
        [-2.0, 1.0]
    )


@pytest.mark.parametrize("surrogate", SURROGATES, ids=repr)
def test_all_agree_where_the_policy_has_not_moved(surrogate: Surrogate):
    advantages = [1.5, -2.0, 0.0]
    _, gradients, clipped = losses_and_gradients(surrogate, [1.0] * 3, advantages)
    assert gradients == pytest.approx([-a for a in advantages])  # the plain policy gradient
    assert clipped == [False] * 3


@pytest.mark.parametrize("surrogate", SURROGATES, ids=repr)
@pytest.mark.parametrize("ratio", [token_ratio, sequence_ratio, sequence_product])
def test_a_loss_of_any_surrogate_masks_adds_up_and_is_finite(surrogate: Surrogate, ratio):
    if isinstance(surrogate, Dppo) and ratio is not token_ratio:
        with pytest.raises(UserError, match="Dppo compares probabilities of tokens"):
            PolicyLoss(surrogate=surrogate, ratio=ratio)
        return
    torch.manual_seed(0)
    lengths, mask = [3, 0, 4, 2], torch.tensor([1, 0, 1, 1, 1, 0, 1, 0, 0])
    old, advantages = torch.randn(9) - 2, torch.randn(9)
    logprobs = (old + 0.3 * torch.randn(9)).requires_grad_()
    loss = PolicyLoss(surrogate=surrogate, ratio=ratio)
    rows = PackedRows.of(lengths, response_logprobs=old, advantages=advantages, response_mask=mask)
    clean, metrics = loss(logprobs, rows)
    poison = torch.where(mask == 1, 0.0, torch.nan)
    dirty, _ = loss(
        logprobs,
        PackedRows.of(
            lengths, response_logprobs=old + poison, advantages=advantages + poison, response_mask=mask
        ),
    )
    assert dirty.item() == clean.item() and 0 <= metrics["clip_fraction"].value <= 1
    (gradient,) = torch.autograd.grad(dirty, logprobs)
    assert gradient.isfinite().all() and (gradient[mask == 0] == 0).all() and gradient.abs().max() > 0

    parts = [(0, 3, [3, 0]), (3, 9, [4, 2])]
    halves = [
        loss(
            logprobs[a:b],
            PackedRows.of(
                n, response_logprobs=old[a:b], advantages=advantages[a:b], response_mask=mask[a:b]
            ),
        )[0]
        for a, b, n in parts
    ]
    torch.testing.assert_close(sum(halves), clean)


def test_a_token_of_no_probability_leaves_the_loss_finite():
    rows = PackedRows.of([1], response_logprobs=[-200.0], advantages=[-1.0])
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, _ = PolicyLoss()(logprobs, rows)
    assert (
        loss.item() == pytest.approx(math.exp(20)) and torch.autograd.grad(loss, logprobs)[0].item() == 0
    )


def test_surrogates_are_values():
    for surrogate in SURROGATES:
        loss = PolicyLoss(surrogate=surrogate)
        assert isinstance(surrogate, Surrogate) and loss == pickle.loads(pickle.dumps(loss))
    assert PolicyLoss(surrogate=Clipped(high=0.28)) != PolicyLoss()


def test_wrong_settings_are_named():
    with pytest.raises(UserError, match=r"dual must be above 1 \+ high, which is 1\.2, not 1\.1"):
        Clipped(dual=1.1)
    with pytest.raises(UserError, match="did you mean 'high'"):
        Clipped(hig=0.3)  # pyright: ignore[reportCallIssue]
    for wrong in (lambda: Clipped(low=1.5), lambda: Cispo(high=-1), lambda: Sapo(temperatures=(0, 1))):
        with pytest.raises(UserError, match="should be"):
            wrong()


def test_a_surrogate_that_returns_something_else_is_named():
    def losses_alone(ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor) -> Any:
        return -ratio * advantages

    rows = PackedRows.of([2], advantages=[1.0, 1.0], response_logprobs=[-1.0, -1.0])
    loss = PolicyLoss(surrogate=losses_alone)
    with pytest.raises(UserError, match=r"losses_alone returned a Tensor; .* \(losses, clipped\)"):
        loss(torch.tensor([-1.0, -1.0], requires_grad=True), rows)
