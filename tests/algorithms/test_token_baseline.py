"""The optimal baseline of each token: numbers by hand, loops in float64, and less variance."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.algorithms.corrections import TruncatedImportance
from weft.algorithms.loss import PackedRows
from weft.algorithms.token_baseline import optimal_baselines, optimal_token_advantages, score_norms
from weft.dataflow.batch import Batch


def random_samples(seed: int) -> Batch:
    drawn = np.random.default_rng(seed)
    lengths = drawn.integers(0, 6, 9)
    cu_seqlens = np.concatenate([[0], lengths.cumsum()])
    number = int(cu_seqlens[-1])
    logits = drawn.normal(size=(number, 5))
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    mask = (drawn.random(number) < 0.7).astype(np.uint8)
    columns = {
        "token_rewards": drawn.normal(size=number),
        "old_logprobs": np.log(probabilities[:, 0]),
        "response_logprobs": np.log(probabilities[:, 0]) + 0.5 * drawn.normal(size=number),
        "log_collisions": np.log((probabilities**2).sum(1)),
    }
    for values in columns.values():
        values[mask == 0] = np.nan
    return Batch.of(group_id=drawn.integers(0, 3, 9)).with_columns(
        response_mask=(mask, cu_seqlens),
        **{name: (values.astype(np.float32), cu_seqlens) for name, values in columns.items()},
    )


def reference(samples: Batch, *, cap: float | None, keeps_tail: bool) -> list[list[float]]:
    """Compute the paper's baseline, by group and place among the trained tokens."""
    names = ("token_rewards", "old_logprobs", "response_logprobs", "log_collisions", "response_mask")
    groups, table = samples["group_id"].to_pylist(), [samples[name].to_pylist() for name in names]
    returns, weights, trained = [], [], []
    for reward, logprob, generator, collisions, mask in zip(*table, strict=True):
        own = [t for t, flag in enumerate(mask) if flag]
        trained.append(own)
        returns.append([sum(reward[t] for t in own[k:]) for k in range(len(own))])
        norms = []
        for t in own:
            norm = 1 - 2 * math.exp(logprob[t]) + math.exp(collisions[t])
            rho = 1.0 if cap is None else min(cap, math.exp(logprob[t] - generator[t]))
            norms.append(norm * rho**2)
        weights.append([sum(norms[: k + 1]) for k in range(len(own))])
    out = [[0.0] * len(mask) for mask in table[-1]]
    for row, own in enumerate(trained):
        peers = [r for r in range(len(groups)) if groups[r] == groups[row]]
        for k, t in enumerate(own):
            there = [r for r in peers if len(trained[r]) > k]
            total = sum(weights[r][k] for r in there)
            baseline = sum(weights[r][k] * returns[r][k] for r in there) / total
            out[row][t] = returns[row][k] - (0.0 if keeps_tail and len(there) == 1 else baseline)
    return out


@given(seed=st.integers(0, 2**31), cap=st.sampled_from([None, 1.2]), keeps_tail=st.booleans())
def test_advantages_against_loops(seed: int, cap: float | None, keeps_tail: bool):
    samples = random_samples(seed)
    importance = None if cap is None else TruncatedImportance(cap=cap)
    found = optimal_token_advantages(samples, importance=importance, keeps_tail=keeps_tail)
    expected = reference(samples, cap=cap, keeps_tail=keeps_tail)
    for mine, theirs in zip(found["advantages"].to_pylist(), expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_the_norm_is_that_of_the_gradient_of_the_log_probability():
    torch.manual_seed(0)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([0, 3, 6, 2])
    logprobs = torch.log_softmax(logits, -1)
    own = logprobs[range(4), chosen]
    (gradient,) = torch.autograd.grad(own.sum(), logits)
    norms = score_norms(own.detach(), (2 * logprobs.detach()).logsumexp(-1))
    torch.testing.assert_close(norms, gradient.square().sum(-1))


def test_rows_alone_and_certain_tokens_have_no_signal():
    sure = {"old_logprobs": [[0.0], [0.0], [0.0]], "log_collisions": [[0.0], [0.0], [0.0]]}
    samples = Batch.of(group_id=[1, 1, 2], token_rewards=[[1.0], [0.0], [5.0]], **sure)
    assert optimal_token_advantages(samples)["advantages"].to_pylist() == [[0.5], [-0.5], [0.0]]
    kept = optimal_token_advantages(samples, keeps_tail=True)["advantages"].to_pylist()
    assert kept == [[0.5], [-0.5], [5.0]]
    assert len(optimal_token_advantages(samples.slice(0, 0))) == 0


def test_the_baseline_lowers_the_variance_of_the_gradient():
    """The rare one of two tokens has the reward, and the larger gradient."""
    drawn = np.random.default_rng(0)
    number, samples_a_group = 4000, 4
    p = np.array([0.9, 0.1])
    first = drawn.choice(2, size=(number, samples_a_group), p=p)
    reward = (first == 1).astype(np.float64)
    scores = np.eye(2)[first] - p  # the gradient of log p with respect to the logits
    norms = (scores**2).sum(-1)
    plain = reward - reward.mean(1, keepdims=True)
    optimal = reward - (norms * reward).sum(1, keepdims=True) / norms.sum(1, keepdims=True)
    ids = np.repeat(np.arange(number), samples_a_group)
    mine = optimal_token_advantages(
        Batch.of(
            group_id=ids,
            token_rewards=reward.reshape(-1, 1).tolist(),
            old_logprobs=np.log(p[first]).reshape(-1, 1).tolist(),
            log_collisions=[[math.log((p**2).sum())]] * len(ids),
        )
    )["advantages"].to_pylist()
    np.testing.assert_allclose(np.ravel(mine), optimal.ravel(), atol=1e-5)
    both = [((scores * a[..., None]).mean(1)).var(0).sum() for a in (plain, optimal)]
    assert both[1] < 0.7 * both[0], both


def test_a_row_that_is_not_a_number_stays_within_its_group():
    rows = PackedRows.of([1, 1, 1, 1])
    norms = torch.tensor([torch.nan, 1.0, 3.0, 1.0], dtype=torch.float64)
    returns, groups = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    found = optimal_baselines(returns, norms, rows, groups)
    assert found[:2].isnan().all() and found[2:].tolist() == [0.75, 0.75]
