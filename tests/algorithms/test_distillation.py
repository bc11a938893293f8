"""Distillation, compared with full distributions in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.algorithms.aggregation import sequence_mean
from weft.algorithms.distillation import (
    SMALLEST_TAIL,
    Distillation,
    Divergence,
    ForwardKl,
    Jsd,
    ReverseKl,
    teacher_advantages,
    with_tail,
)
from weft.algorithms.loss import PackedRows
from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch

DIVERGENCES = [ReverseKl(), ForwardKl(), Jsd(beta=0.5), Jsd(beta=0.1)]


def reference(divergence: Divergence, p: Tensor, q: Tensor) -> Tensor:
    """Return the divergence of probabilities p (student) and q (teacher), [m]."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.sum(a * torch.log(a / b))

    match divergence:
        case ReverseKl():
            return kl(p, q)
        case ForwardKl():
            return kl(q, p)
        case Jsd(beta=beta):
            mixture = beta * q + (1 - beta) * p
            return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)
    raise AssertionError(divergence)


def with_candidates(student: Tensor, teacher: Tensor, k: int) -> PackedRows:
    """Return one row with a token per row of logits [T, vocabulary], and the teacher's k tokens."""
    logprobs, ids = teacher.log_softmax(-1).topk(k)
    return PackedRows.of(
        [len(student)],
        teacher_ids=ids,
        teacher_logprobs=logprobs,
        candidate_logprobs=student.log_softmax(-1).gather(1, ids),
    )


@given(seed=st.integers(0, 2**31), k=st.integers(1, 6), divergence=st.sampled_from(DIVERGENCES))
def test_values_and_gradients_are_those_of_the_outcomes_and_a_tail(
    seed: int, k: int, divergence: Divergence
):
    made = torch.Generator().manual_seed(seed)
    logits, teacher = (torch.randn(3, 7, dtype=torch.float64, generator=made) for _ in range(2))
    student = logits.clone().requires_grad_()
    loss_sum, _ = Distillation(divergence=divergence, weight=0.7)(
        torch.zeros(3), with_candidates(student, teacher, k)
    )
    again, expected = logits.clone().requires_grad_(), torch.tensor(0.0, dtype=torch.float64)
    for token in range(3):
        p, q = again[token].softmax(0), teacher[token].softmax(0)
        ids = q.topk(k).indices
        rest = torch.ones(7, dtype=torch.bool).scatter(0, ids, False)
        p, q = (torch.cat([each[ids], each[rest].sum()[None]]) for each in (p, q))
        expected = expected + 0.7 * reference(divergence, p, q)
    torch.testing.assert_close(loss_sum, expected)
    [ours], [right] = torch.autograd.grad(loss_sum, student), torch.autograd.grad(expected, again)
    torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=repr)
def test_impossible_tokens_give_finite_losses_and_gradients(divergence: Divergence):
    student = torch.tensor([[0.0, -300.0, -1.0]], requires_grad=True)
    teacher = torch.tensor([[-300.0, -300.0, 0.0]])
    loss_sum = divergence(student.log_softmax(-1), teacher.log_softmax(-1)).sum()
    [slope] = torch.autograd.grad(loss_sum, student)
    assert loss_sum > 0 and slope.isfinite().all() and slope.abs().sum() > 0


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=repr)
def test_one_token_reaches_the_teacher(divergence: Divergence):
    """The optimum is the teacher's distribution over its k tokens, and its mass of the others."""
    torch.manual_seed(0)
    teacher = torch.randn(1, 9) * 2
    student = torch.zeros(1, 9, requires_grad=True)
    for _ in range(500):
        loss_sum, _ = Distillation(divergence=divergence)(
            torch.zeros(1), with_candidates(student, teacher, 5)
        )
        [slope] = torch.autograd.grad(loss_sum, student)
        with torch.no_grad():
            student -= 2 * slope
    rows = with_candidates(student.detach(), teacher, 5)
    p, q = with_tail(rows["candidate_logprobs"]).exp(), with_tail(rows["teacher_logprobs"]).exp()
    assert float((q * (q / p).log()).sum()) < 0.01


def test_a_tail_without_mass_still_pulls_and_stays_finite():
    candidates = torch.tensor([[0.0, -30.0]], requires_grad=True)
    rows = PackedRows.of(
        [1],
        teacher_ids=[[1, 2]],
        teacher_logprobs=torch.tensor([[0.5, 0.25]]).log(),
        candidate_logprobs=candidates,
    )
    loss_sum, metrics = Distillation(divergence=ForwardKl())(torch.zeros(1), rows)
    loss_sum.backward()
    assert candidates.grad is not None and candidates.grad.isfinite().all()
    assert candidates.grad[0, 0] > 1000  # the teacher's tail of 0.25 lowers the first token
    assert metrics["student_tail"].value == pytest.approx(SMALLEST_TAIL)


def test_a_reward_and_a_teacher_add_up():
    torch.manual_seed(0)
    rows = with_candidates(torch.randn(3, 7), torch.randn(3, 7), 2)
    more = {"advantages": [1.0, -1.0, 0.5], "response_logprobs": [-1.0, -1.0, -1.0]}
    columns = {name: torch.tensor(values) for name, values in more.items()}
    rows = PackedRows(rows.cu_seqlens, {**rows.columns, **columns})
    logprobs, policy = torch.tensor([-0.9, -1.1, -1.0]), PolicyLoss()
    both, metrics = Distillation(weight=0.5, policy=policy)(logprobs, rows)
    teacher, _ = Distillation(weight=0.5)(logprobs, rows)
    reward, of_policy = policy(logprobs, rows)
    assert both.item() == pytest.approx(teacher.item() + reward.item())
    assert {*of_policy, "divergence"} <= {*metrics}
    with pytest.raises(ValueError, match="both need the same"):
        Distillation(aggregation=sequence_mean, policy=policy)


def test_advantages_of_a_teacher_are_added_to_those_of_a_reward():
    samples = Batch.of(
        response_ids=[[1, 2], [3]],
        response_mask=[[1, 0], [1]],
        response_logprobs=[[-1.0, -1.0], [-2.0]],
        reference_logprobs=[[-0.5, float("nan")], [-1.0]],
        reward_advantages=[[1.0, 1.0], [0.0]],
    )
    found = teacher_advantages(samples, weight=2.0, base="reward_advantages")["advantages"].to_pylist()
    assert found == [[2.0, 1.0], [2.0]]
