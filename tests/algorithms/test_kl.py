"""KL: numbers by hand, expected values and gradients against exact ones, and the coefficient's
controller."""

import pickle

import pytest
import torch

from weft.algorithms.kl import (
    AdaptiveCoefficient,
    KlPenalty,
    StraightThrough,
    absolute,
    full_kl,
    k1,
    k2,
    k3,
)
from weft.algorithms.loss import PackedRows
from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.errors import UserError


def test_kl_estimators_by_hand_and_on_average():
    torch.manual_seed(0)
    p, q = (
        torch.log_softmax(torch.randn(5, dtype=torch.float64), 0),
        torch.log_softmax(torch.randn(5, dtype=torch.float64), 0),
    )
    exact = (p.exp() * (p - q)).sum()
    for estimator in (k1, k3):  # unbiased
        torch.testing.assert_close((p.exp() * estimator(p, q)).sum(), exact)
    assert (k2(p, q) >= 0).all() and (k3(p, q) >= 0).all()
    for estimator in (k1, k2, k3):
        assert estimator(p, p).abs().max() == 0
        assert estimator(torch.tensor([]), torch.tensor([])).tolist() == []


def test_the_gradients_of_the_estimators_are_those_that_they_state():
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.randn(5, dtype=torch.float64), 0)
    p = torch.log_softmax(logits, 0)
    weights = p.detach().exp()  # tokens are drawn from p, and the draw has no gradient

    def expected(estimator) -> torch.Tensor:
        return torch.autograd.grad((weights * estimator(p, q)).sum(), logits, retain_graph=True)[0]

    forward = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)[0]
    backward = torch.autograd.grad((q.exp() * (q - p)).sum(), logits, retain_graph=True)[0]
    assert expected(k1).abs().max() < 1e-12
    torch.testing.assert_close(expected(k2), forward)
    torch.testing.assert_close(expected(k3), backward)
    # Weighted by the ratio, whose draws have a gradient, both unbiased estimators have the gradient of the KL.
    for estimator in (k1, k3):
        weighted = (weights * (p - p.detach()).exp() * estimator(p, q)).sum()
        torch.testing.assert_close(torch.autograd.grad(weighted, logits, retain_graph=True)[0], forward)


def test_k3_stays_finite_where_the_policy_has_left_the_reference():
    p = torch.tensor([-1000.0], requires_grad=True)
    k3(p, torch.tensor([-1.0])).sum().backward()
    assert p.grad is not None and p.grad.isfinite().all()


def test_absolute_by_hand():
    p = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    kl = absolute(p, torch.tensor([-2.0, -1.5, -3.0]))
    assert kl.tolist() == [1.0, 0.5, 0.0]
    assert torch.autograd.grad(kl.sum(), p)[0].tolist() == [1.0, -1.0, 0.0]


def test_the_full_divergence_equals_the_mean_of_the_estimators():
    torch.manual_seed(0)
    logits, reference = torch.randn(2, 4, 7, dtype=torch.float64)
    logits.requires_grad_()
    p, q = torch.log_softmax(logits, 1), torch.log_softmax(reference, 1)
    exact = full_kl(logits + 3.0, reference - 2.0)  # logits are only defined up to a constant
    torch.testing.assert_close(exact, (p.exp() * k1(p, q)).sum(1))
    (gradient,) = torch.autograd.grad(exact.sum(), logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((p.detach().exp() * k2(p, q)).sum(), logits)
    torch.testing.assert_close(gradient, of_k2)
    assert full_kl(torch.zeros(0, 3), torch.zeros(0, 3)).tolist() == []
    assert full_kl(reference, reference).abs().max() < 1e-12


@pytest.mark.parametrize("value", [k1, k2, k3, absolute])
@pytest.mark.parametrize("gradient", [k1, k2, k3])
def test_straight_through_has_the_value_of_one_and_the_gradient_of_the_other(value, gradient):
    torch.manual_seed(0)
    p, q = torch.randn(2, 9, dtype=torch.float64)
    p.requires_grad_()
    both = StraightThrough(value, gradient)(p, q)
    torch.testing.assert_close(both, value(p, q))
    mine, expected = (torch.autograd.grad(kl.sum(), p)[0] for kl in (both, gradient(p, q)))
    torch.testing.assert_close(mine, expected)


def test_straight_through_is_a_value_that_a_penalty_takes():
    penalty = KlPenalty(coefficient=0.5, estimator=StraightThrough(k3))
    assert (
        penalty
        == pickle.loads(pickle.dumps(penalty))
        == KlPenalty(coefficient=0.5, estimator=StraightThrough(k3, k2))
    )
    rows = PackedRows.of([1], advantages=[0.0], response_logprobs=[-1.0], reference_logprobs=[-1.5])
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, metrics = PolicyLoss(kl=penalty)(logprobs, rows)
    assert torch.autograd.grad(loss, logprobs)[0].item() == pytest.approx(0.5 * 0.5)  # coefficient x d
    assert metrics["kl"].value == pytest.approx(0.5 + torch.tensor(-0.5).exp().item() - 1)


def test_the_coefficient_follows_the_target_by_hand():
    start = AdaptiveCoefficient(value=0.1, target=4.0, horizon=1000)
    assert start.updated(4.0, 100).value == pytest.approx(0.1)
    assert start.updated(4.4, 100).value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    # at most a fifth
    assert start.updated(400.0, 100).value == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert start.updated(-4.0, 100).value == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    assert start.value == 0.1 and start.updated(8.0, 10).target == 4.0
    with pytest.raises(UserError, match=r"AdaptiveCoefficient\.value: .*greater than or equal to 0"):
        start.updated(0.0, 6000)
    with pytest.raises(UserError, match=r"AdaptiveCoefficient\.target"):
        AdaptiveCoefficient(target=0.0)


def test_the_coefficient_brings_a_policy_that_obeys_it_to_the_target():
    coefficient = AdaptiveCoefficient(value=0.01, target=2.0, horizon=100)
    for _ in range(400):
        # a larger coefficient lowers the KL
        coefficient = coefficient.updated(1.0 / coefficient.value, 10)
    assert 1.0 / coefficient.value == pytest.approx(2.0, rel=0.01)
