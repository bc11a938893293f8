"""Corrections over a whole step: numbers by hand, loops in float64, and their effect on the loss."""

import itertools
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.algorithms.corrections import Rejection, TruncatedImportance
from weft.algorithms.distillation import Distillation, distillation
from weft.algorithms.grpo import grpo
from weft.algorithms.loss import PackedRows
from weft.algorithms.policy_loss import PolicyLoss, needs_forward_pass
from weft.algorithms.ppo import ppo
from weft.algorithms.step_corrections import (
    NormalizedImportance,
    PolicyFiltration,
    SecondMoment,
    StepCorrection,
    TopEntropy,
    step_weights,
)
from weft.algorithms.surrogates import Unclipped
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker
from weft.workers.critic import CriticWorker
from weft.workers.reference import ReferenceWorker
from weft.workers.reward import RewardWorker
from weft.workers.rollout import RolloutWorker

RULES = [TopEntropy(), SecondMoment(), NormalizedImportance(), PolicyFiltration()]


def random_samples(seed: int, masked: float = 0.3) -> Batch:
    """Rows whose masked tokens, and rows without a trained token, have NaN in all columns."""
    drawn = np.random.default_rng(seed)
    lengths = drawn.integers(0, 6, 8)
    cu_seqlens = np.concatenate([[0], lengths.cumsum()])
    mask = (drawn.random(int(cu_seqlens[-1])) >= masked).astype(np.uint8)
    columns = {
        name: drawn.normal(size=len(mask)).astype(np.float32)
        for name in ("old_logprobs", "response_logprobs", "advantages")
    }
    columns["entropies"] = drawn.random(len(mask)).astype(np.float32)
    for values in columns.values():
        values[mask == 0] = np.nan
    trained = np.array([mask[a:b].any() for a, b in itertools.pairwise(cu_seqlens)])
    reward = np.where(trained, drawn.normal(size=8), np.nan).astype(np.float32)
    made = Batch.of(sample_id=np.arange(8), group_id=np.arange(8) // 2, reward=reward)
    return made.with_columns(
        response_ids=(np.zeros(len(mask), np.int32), cu_seqlens),
        response_mask=(mask, cu_seqlens),
        **{name: (values, cu_seqlens) for name, values in columns.items()},
    )


def trained_tokens(samples: Batch) -> list[dict[str, float]]:
    """Return the values of each trained token, and its row and place."""
    names = ("old_logprobs", "response_logprobs", "advantages", "entropies", "response_mask")
    columns = [samples[name].to_pylist() for name in names]
    rewards = samples["reward"].to_pylist()
    found = []
    for row, values in enumerate(zip(*columns, strict=True)):
        for place, token in enumerate(zip(*values, strict=True)):
            own = dict(zip(names, token, strict=True))
            if own["response_mask"]:
                found.append({**own, "row": row, "place": place, "reward": rewards[row]})
    return found


def weights_of(samples: Batch, rule: StepCorrection) -> list[float]:
    """Return the weights of the trained tokens; all others must be 1."""
    made = step_weights(samples, rule=rule)["token_weights"].to_pylist()
    mask = samples["response_mask"].to_pylist()
    pairs = [
        pair for row, flags in zip(made, mask, strict=True) for pair in zip(row, flags, strict=True)
    ]
    assert all(weight == 1 for weight, trained in pairs if not trained)
    return [weight for weight, trained in pairs if trained]


@given(seed=st.integers(0, 2**31), share=st.sampled_from([0.01, 0.2, 0.5, 1.0]))
def test_the_tokens_with_the_highest_entropy_have_a_gradient(seed: int, share: float):
    samples = random_samples(seed)
    tokens = trained_tokens(samples)
    number = max(1, int(share * len(tokens)))
    highest = sorted(range(len(tokens)), key=lambda t: -tokens[t]["entropies"])[:number]
    expected = [float(t in highest) for t in range(len(tokens))]
    assert weights_of(samples, TopEntropy(share=share)) == expected


@given(seed=st.integers(0, 2**31), limit=st.sampled_from([0.01, 0.3, 1.0, 100.0]))
def test_the_second_moment_is_limited_by_masking_the_largest(seed: int, limit: float):
    samples = random_samples(seed)
    tokens = trained_tokens(samples)
    moved = [t["old_logprobs"] - t["response_logprobs"] for t in tokens]
    could_clip = [t for t, own in enumerate(tokens) if moved[t] * own["advantages"] > 0]
    kept = sorted(could_clip, key=lambda t: abs(moved[t]))
    while kept and sum(moved[t] ** 2 for t in kept) / len(kept) > limit:
        kept.pop()
    expected = [float(t in kept or t not in could_clip) for t in range(len(tokens))]
    assert weights_of(samples, SecondMoment(limit=limit)) == expected


@given(seed=st.integers(0, 2**31), level=st.sampled_from(["token", "sequence", "geometric"]))
def test_normalized_weights_have_a_mean_of_one(seed: int, level: Any):
    samples = random_samples(seed)
    tokens = trained_tokens(samples)
    rule = NormalizedImportance(importance=TruncatedImportance(cap=1.5, floor=0.2, level=level))
    rows: dict[float, list[float]] = {}
    for t in tokens:
        rows.setdefault(t["row"], []).append(t["old_logprobs"] - t["response_logprobs"])

    def weight(row: float, own: float) -> float:
        total = sum(rows[row])
        log_ratio = {"token": own, "sequence": total, "geometric": total / len(rows[row])}[level]
        return min(max(math.exp(log_ratio), 0.2), 1.5)

    own = [weight(t["row"], t["old_logprobs"] - t["response_logprobs"]) for t in tokens]
    counted = own if level == "token" else [weight(row, 0.0) for row in rows]
    expected = [w / (sum(counted) / len(counted)) for w in own]
    assert weights_of(samples, rule) == pytest.approx(expected, rel=1e-5)


@given(seed=st.integers(0, 2**31), power=st.sampled_from([0.5, 1.0, 2.0]))
def test_filtration_weighs_a_row_by_its_expected_number_of_copies(seed: int, power: float):
    samples = random_samples(seed)
    tokens = trained_tokens(samples)
    rewards = {t["row"]: abs(t["reward"]) ** power for t in tokens}
    mean = sum(rewards.values()) / max(1, len(rewards))
    expected = [rewards[t["row"]] / mean for t in tokens]
    assert weights_of(samples, PolicyFiltration(power=power)) == pytest.approx(expected, rel=1e-5)


def test_rows_that_all_have_no_reward_weigh_the_same():
    samples = Batch.of(response_ids=[[1, 2], [3]], reward=[0.0, 0.0])
    assert step_weights(samples, rule=PolicyFiltration())["token_weights"].to_pylist() == [[1, 1], [1]]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_batch_without_trained_tokens_has_no_weights(rule: StepCorrection):
    assert weights_of(random_samples(0, masked=1.0), rule) == []
    assert weights_of(random_samples(0).slice(0, 0), rule) == []


def test_the_loss_multiplies_and_counts_masked_tokens():
    columns = {"advantages": [1.0, 2.0, -1.0, 1.0], "response_mask": [1, 1, 1, 0]}
    weights = {"token_weights": [0.0, 1.5, 1.0, 9.0], "response_logprobs": [-1.0] * 4}
    rows = PackedRows.of([3, 1], **columns, **weights)
    logprobs = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    loss = PolicyLoss(surrogate=Unclipped(), correction=SecondMoment())
    total, metrics = loss(logprobs, rows)
    assert total.item() == pytest.approx(-3.0 + 1.0) and loss.count(rows) == 3
    assert torch.autograd.grad(total, logprobs)[0].tolist() == [0.0, -3.0, 1.0, 0.0]
    assert metrics["masked_tokens"].value == 1 and metrics["masked_fraction"].value == pytest.approx(
        1 / 3
    )
    both = PolicyLoss(surrogate=Unclipped(), correction=(SecondMoment(), Rejection()))
    assert both(logprobs, rows)[0].item() == pytest.approx(-2.0)
    del rows.columns["token_weights"]  # pyright: ignore[reportIndexIssue]
    with pytest.raises(UserError, match="reads column 'token_weights', which its rows do not have"):
        loss(logprobs, rows)


def test_normalized_weights_replace_the_ratio_to_the_generator():
    with pytest.raises(UserError, match="only one correction may weigh with the ratio"):
        PolicyLoss(correction=(TruncatedImportance(), NormalizedImportance()))
    with pytest.raises(UserError, match="only one correction may compare the tokens of a step"):
        PolicyLoss(correction=(TopEntropy(), SecondMoment()))
    loss = PolicyLoss(correction=NormalizedImportance())
    assert "old_logprobs" in loss.may_read and "token_weights" in loss.reads


def always_one(response: str) -> float:
    return 1.0


@pytest.mark.parametrize("rule", [None, *RULES], ids=repr)
def test_graphs_compute_weights_if_the_loss_needs_them(rule: StepCorrection | None):
    rollout, actor = group(RolloutWorker, model="m"), group(ActorWorker, model="m")
    reward = group(RewardWorker, function=always_one, tokenizer="m")
    critic, teacher = group(CriticWorker, model="m"), group(ReferenceWorker, model="m")
    prompts = TableSource("prompts", pa.table({"prompt_ids": [[1]]}))
    loss = PolicyLoss() if rule is None else PolicyLoss(correction=rule)
    sampled: dict[str, Any] = {"rollout": rollout, "reward": reward, "actor": actor}
    for graph in (
        grpo(prompts, **sampled, loss=loss),
        ppo(prompts, **sampled, critic=critic, loss=loss),
        distillation(prompts, **sampled, teacher=teacher, loss=Distillation(policy=loss)),
        distillation(prompts, **sampled, teacher=teacher, top=0, loss=loss),
    ):
        names = [node.name for node in graph.nodes]
        assert ("step_weights" in names) == (rule is not None)
        assert ("token_weights" in graph["actor.update"].reads) == (rule is not None)
        wanted = () if rule is None else rule.compares
        before = {"old_logprobs", "entropies"} & set(wanted)
        assert ("actor.logprobs" in names) == bool(before) == needs_forward_pass(loss)
        if before:
            assert set(graph["actor.logprobs"].writes) >= before


def test_values_that_are_not_numbers_are_not_chosen_and_change_no_other_weight():
    rows = PackedRows.of([3], entropies=[torch.nan, 1.0, 0.5])
    assert TopEntropy(share=0.4).weights(rows).tolist() == [0.0, 1.0, 0.0]
    half, nan = float(np.log(0.5)), float("nan")
    rows = PackedRows.of([3], old_logprobs=[0.0, 0.0, nan], response_logprobs=[half, -half, 0.0])
    assert NormalizedImportance().weights(rows)[:2].tolist() == pytest.approx([1.6, 0.4])


@pytest.mark.parametrize(("share", "number"), [(0.29, 29), (0.57, 57), (0.001, 1), (1.0, 100)])
def test_rounding_loses_no_token(share: float, number: int):
    rows = PackedRows.of([100], entropies=torch.arange(100.0))
    assert TopEntropy(share=share).weights(rows).sum() == number


def test_a_selection_is_no_correction_of_the_gap_to_the_generator():
    assert not PolicyLoss(correction=TopEntropy()).corrects_gap
    assert not PolicyLoss(correction=PolicyFiltration()).corrects_gap and not PolicyLoss().corrects_gap
    assert PolicyLoss(correction=(TopEntropy(), Rejection(keep=(0.5, 2.0)))).corrects_gap
    rows = PackedRows.of(
        [2], advantages=[1.0, 1.0], response_logprobs=[-1.0, -1.0], token_weights=[1.0, 0.0]
    )
    _, metrics = PolicyLoss(correction=TopEntropy())(torch.tensor([-1.0, -1.0]), rows)
    assert "masked_fraction" not in metrics and metrics["masked_tokens"].value == 1
