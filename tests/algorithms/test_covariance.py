"""Clip-Cov and KL-Cov: marked tokens and losses, compared with loops in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.algorithms.covariance import ClipCov, CovarianceRule, KlCov, high_covariance
from weft.algorithms.loss import PackedRows
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.surrogates import Unclipped
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError


def random_samples(seed: int, masked: float = 0.3) -> Batch:
    drawn = np.random.default_rng(seed)
    lengths = drawn.integers(0, 6, 8)
    cu_seqlens = np.concatenate([[0], lengths.cumsum()])
    tokens = int(cu_seqlens[-1])

    def ragged(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return values, cu_seqlens

    mask = (drawn.random(tokens) >= masked).astype(np.uint8)
    # The values of masked tokens may be anything.
    logprobs, advantages = (drawn.normal(size=tokens).astype(np.float32) for _ in range(2))
    for values in (logprobs, advantages):
        values[mask == 0] = np.nan
    return Batch.of(sample_id=drawn.permutation(1000)[:8] + 2**40).with_columns(
        response_ids=ragged(np.zeros(tokens, np.int32)),
        response_mask=ragged(mask),
        response_logprobs=ragged(logprobs),
        advantages=ragged(advantages),
    )


def covariances(samples: Batch, logprobs: str = "response_logprobs") -> dict[tuple[int, int], float]:
    """Return the covariance of each trained token, by row and place."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    columns = (samples[c].to_pylist() for c in (logprobs, "advantages", "response_mask"))
    for row, values in enumerate(zip(*columns, strict=True)):
        for place, (logprob, advantage, trained) in enumerate(zip(*values, strict=True)):
            if trained:
                found[row, place] = logprob, advantage
    means = [sum(each) / len(found) for each in zip(*found.values(), strict=True)] if found else []
    return {token: (p - means[0]) * (a - means[1]) for token, (p, a) in found.items()}


def marked(samples: Batch, rule: CovarianceRule) -> set[tuple[int, int]]:
    flags = high_covariance(samples, rule=rule)["high_covariance"].to_pylist()
    return {(row, place) for row, each in enumerate(flags) for place, flag in enumerate(each) if flag}


@given(seed=st.integers(0, 2**31), share=st.sampled_from([1e-4, 0.2, 0.5, 1.0]))
def test_kl_cov_marks_the_highest_covariances(seed: int, share: float):
    samples = random_samples(seed)
    expected = covariances(samples)
    number = max(1, int(share * len(expected)))
    highest = sorted(expected, key=lambda token: -expected[token])[:number]
    assert marked(samples, KlCov(share=share)) == set(highest)


@given(seed=st.integers(0, 2**31), share=st.sampled_from([1e-4, 0.2, 1.0]))
def test_clip_cov_draws_from_its_bounds_and_draws_the_same_again(seed: int, share: float):
    samples, rule = random_samples(seed), ClipCov(share=share, bounds=(0.1, 1.0))
    expected = covariances(samples)
    within = {token for token, value in expected.items() if 0.1 <= value <= 1.0}
    found = marked(samples, rule)
    assert found <= within and len(found) == min(len(within), max(1, int(share * len(expected))))
    assert found == marked(samples, rule)


def test_clip_cov_draws_other_tokens_for_other_rows():
    """Otherwise the same places of a batch would lose their gradient in every step."""
    rule, samples = ClipCov(share=0.1, bounds=(-10.0, 10.0)), random_samples(0, masked=0.0)
    ids = samples.numpy("sample_id")
    found = {frozenset(marked(samples.with_columns(sample_id=ids + k), rule)) for k in range(20)}
    assert len(found) > 10


def test_the_actor_before_the_update_comes_before_the_generator():
    samples = random_samples(3, masked=0.0)
    logprobs, cu_seqlens = samples.ragged_numpy("response_logprobs")
    other = samples.with_columns(old_logprobs=(-logprobs, cu_seqlens))
    expected = covariances(other, "old_logprobs")
    assert marked(other, KlCov(share=1e-4)) == {max(expected, key=lambda token: expected[token])}
    assert marked(other, KlCov(share=1e-4)) != marked(samples, KlCov(share=1e-4))


def test_a_batch_without_trained_tokens_has_no_marks():
    assert marked(random_samples(0, masked=1.0), KlCov()) == set()
    assert marked(random_samples(0).slice(0, 0), ClipCov()) == set()


@pytest.mark.parametrize("rule", [ClipCov(), KlCov(coefficient=0.3)], ids=["clip", "kl"])
def test_the_loss_treats_marked_tokens_as_the_paper_says(rule: CovarianceRule):
    drawn = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(7, generator=drawn, dtype=torch.float64) for _ in range(3))
    marks, mask = torch.tensor([1, 0, 1, 0, 1, 0, 0]), torch.tensor([1, 1, 1, 1, 0, 0, 1])
    logprobs.requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for t in range(7):
        if not mask[t] or (marks[t] and isinstance(rule, ClipCov)):
            continue
        log_ratio = logprobs[t] - old[t]
        expected = expected - log_ratio.exp() * advantages[t]
        if marks[t] and isinstance(rule, KlCov):
            expected = expected + 0.3 * log_ratio.abs()
    columns = {"response_logprobs": old, "advantages": advantages, "response_mask": mask}
    rows = PackedRows.of([4, 3], high_covariance=marks.to(torch.uint8), **columns)
    loss = PolicyLoss(covariance=rule, surrogate=Unclipped())
    total, metrics = loss(logprobs, rows)
    torch.testing.assert_close(total, expected)
    [ours], [right] = (torch.autograd.grad(each, logprobs) for each in (total, expected))
    torch.testing.assert_close(ours, right)
    assert metrics["high_covariance_fraction"].value == pytest.approx(2 / 5)
    assert loss.count(rows) == 5, "marked tokens count in the mean"
    with pytest.raises(UserError, match="reads column 'high_covariance', which its rows do not have"):
        loss(logprobs, PackedRows.of([4, 3], **columns))


def test_bounds_must_rise():
    with pytest.raises(UserError, match="bounds must rise"):
        ClipCov(bounds=(2.0, 1.0))
