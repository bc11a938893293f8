"""Corrections: numbers by hand, a plain float64 reference with gradients, and shared properties."""

import itertools
import math
from typing import Any

import pytest
import torch

from weft.algorithms.aggregation import fixed_length, sequence_mean, token_mean
from weft.algorithms.corrections import (
    Correction,
    DivergenceRejection,
    DriftRejection,
    Level,
    Rejection,
    TruncatedImportance,
    combined,
)
from weft.algorithms.kl import absolute, k2, k3
from weft.algorithms.loss import PackedRows
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.surrogates import Clipped, sequence_ratio, token_ratio
from weft.dataflow.errors import UserError
from weft.dataflow.metrics import merge

LENGTHS = [3, 1, 0, 5, 2, 4]
LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")
CORRECTIONS: list[tuple[Any, ...]] = [
    *((TruncatedImportance(cap=1.1, level=level),) for level in LEVELS),
    *((Rejection(keep=(0.8, 1.25), level=level),) for level in LEVELS),
    (TruncatedImportance(cap=1.25), Rejection(keep=(0.8, 1.25))),
    (Rejection(keep=(0.7, 1.5), level="geometric"), TruncatedImportance(cap=1.1, level="sequence")),
]
LOSSES = [
    PolicyLoss(
        correction=corrections,
        old=old,
        ratio=ratio,
        aggregation=aggregation,
        surrogate=Clipped(high=0.3),
    )
    for corrections, old, (ratio, aggregation) in itertools.product(
        CORRECTIONS,
        ["old_logprobs", None],
        [(token_ratio, token_mean), (token_ratio, fixed_length(6)), (sequence_ratio, sequence_mean)],
    )
]


def random_rows(
    seed: int = 0, *, old: bool = True, spread: float = 0.3
) -> tuple[torch.Tensor, PackedRows]:
    """Random float64 rows: some tokens masked, one row fully masked, one row empty."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)
    draw = lambda: torch.randn(num_tokens, generator=generator, dtype=torch.float64)  # noqa: E731
    logprobs = -2 + 0.5 * draw()
    columns = {"advantages": draw(), "response_logprobs": logprobs + spread * draw()}
    columns |= {"old_logprobs": logprobs + spread * draw()} if old else {}
    columns["response_mask"] = (torch.rand(num_tokens, generator=generator) < 0.7).to(torch.uint8)
    columns["response_mask"][3] = 0  # the second row, with one token
    return logprobs.requires_grad_(), PackedRows.of(LENGTHS, **columns)


def plain(rows: PackedRows, name: str) -> list[float]:
    return rows[name].tolist()


def tokens_of_rows(rows: PackedRows) -> list[list[int]]:
    """Return the trained tokens of each row."""
    ends = rows.cu_seqlens.tolist()
    mask = plain(rows, "response_mask")
    return [[t for t in range(a, b) if mask[t]] for a, b in itertools.pairwise(ends)]


def chosen(loss: PolicyLoss) -> tuple[Any, ...]:
    return loss.correction if isinstance(loss.correction, tuple) else (loss.correction,)


def of_trainer(loss: PolicyLoss) -> bool:
    """Return whether the ratio compares with the trainer instead of the generator."""
    weighs = any(isinstance(c, TruncatedImportance) for c in chosen(loss))
    return bool(loss.old) or weighs or loss.ratio is sequence_ratio


def has_trainer(loss: PolicyLoss, rows: PackedRows) -> bool:
    """Return whether the trainer's logprobs come from a column, not from the current policy."""
    return of_trainer(loss) and "old_logprobs" in rows


def reference_weights(loss: PolicyLoss, logprobs: torch.Tensor, rows: PackedRows) -> dict[int, float]:
    """Compute the weight of each trained token, in plain Python."""
    trainer = plain(rows, "old_logprobs") if has_trainer(loss, rows) else logprobs.tolist()
    generator, weights = plain(rows, "response_logprobs"), {}
    for tokens in tokens_of_rows(rows):
        differences = [trainer[t] - generator[t] for t in tokens]
        for t, own in zip(tokens, differences, strict=True):
            weights[t] = 1.0
            for correction in chosen(loss):
                log_ratio = {
                    "token": own,
                    "sequence": sum(differences),
                    "geometric": sum(differences) / len(tokens),
                }
                ratio = math.exp(log_ratio[correction.level])
                if isinstance(correction, TruncatedImportance):
                    weights[t] *= min(ratio, correction.cap)
                elif not correction.keep[0] <= ratio <= correction.keep[1]:
                    weights[t] = 0.0
    return weights


def reference(loss: PolicyLoss, logprobs: torch.Tensor, rows: PackedRows) -> Any:
    """Compute the papers' mean, by row and token."""
    weights = reference_weights(loss, logprobs, rows)
    kept = []
    for tokens in filter(None, tokens_of_rows(rows)):
        if has_trainer(loss, rows):
            anchors = [rows["old_logprobs"][t] for t in tokens]
        else:
            anchors = [
                logprobs[t].detach() if of_trainer(loss) else rows["response_logprobs"][t]
                for t in tokens
            ]
        log_ratios = [logprobs[t] - anchor for t, anchor in zip(tokens, anchors, strict=True)]
        if loss.ratio is sequence_ratio:
            log_ratios = [torch.stack(log_ratios).mean()] * len(tokens)
        losses = []
        for t, log_ratio in zip(tokens, log_ratios, strict=True):
            r, a = log_ratio.exp(), rows["advantages"][t]
            losses.append(-weights[t] * torch.minimum(r * a, r.clamp(0.8, 1.3) * a))
        kept.append(losses)
    if loss.aggregation is token_mean:
        return sum(map(sum, kept)) / sum(map(len, kept))
    return sum(sum(row) / (len(row) if loss.aggregation is sequence_mean else 6) for row in kept) / len(
        kept
    )


def of_rows(
    rows: PackedRows, logprobs: torch.Tensor, order: list[int]
) -> tuple[torch.Tensor, PackedRows]:
    """Return some of the rows, in this order."""
    ends = rows.cu_seqlens.tolist()
    index = torch.tensor(
        [t for row in order for t in range(ends[row], ends[row + 1])], dtype=torch.int64
    )
    return logprobs[index], PackedRows.of(
        [LENGTHS[r] for r in order], **{n: v[index] for n, v in rows.columns.items()}
    )


def numbers(metrics: Any) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


# By hand

LN2 = math.log(2)


def test_only_bad_responses_that_drifted_are_masked():
    rows = PackedRows.of(
        [2, 2, 2, 1], advantages=[-1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0], response_mask=[1] * 5 + [0, 0]
    )
    drift = torch.tensor([-1.2, 0.0, -9.0, -9.0, -0.4, -9.0, -9.0])
    weights, truncated, masked = DriftRejection(limit=0.5)(rows.only_trained(drift), rows)
    assert weights.tolist() == [0, 0, 1, 1, 1, 1, 1] and not truncated.any()
    assert masked.tolist() == [True, True, False, False, False, False, False]


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (TruncatedImportance(cap=2.0), [2.0, 0.5, 1.0, 2.0]),
        (TruncatedImportance(cap=5.0), [4.0, 0.5, 1.0, 2.0]),
        (TruncatedImportance(cap=0.75), [0.75, 0.5, 0.75, 0.75]),
        (TruncatedImportance(cap=3.0, floor=0.8), [3.0, 0.8, 1.0, 2.0]),
        (TruncatedImportance(cap=1.0, floor=1.0), [1.0, 1.0, 1.0, 1.0]),
        (TruncatedImportance(cap=5.0, level="sequence"), [2.0, 2.0, 2.0, 2.0]),
        (TruncatedImportance(cap=5.0, level="geometric"), [2 ** (1 / 3)] * 3 + [2.0]),
        (TruncatedImportance(cap=1.5, level="sequence"), [1.5] * 4),
        (Rejection(keep=(0.6, 2.5)), [0.0, 0.0, 1.0, 1.0]),
        (Rejection(keep=(0.6, 1.5), level="sequence"), [0.0] * 4),
        (Rejection(keep=(0.6, 1.5), level="geometric"), [1.0, 1.0, 1.0, 0.0]),
        (Rejection(keep=(0.0, math.inf)), [1.0] * 4),
    ],
    ids=str,
)
def test_weights_by_hand(correction: Correction, weights: list[float]):
    log_ratio = torch.tensor([2 * LN2, -LN2, 0.0, LN2], dtype=torch.float64)  # 4, 1/2 and 1; 2
    found, _, _ = correction(log_ratio, PackedRows.of([3, 1]))
    assert found.tolist() == pytest.approx(weights)
    assert isinstance(correction, Correction)


def test_truncated_importance_sampling_by_hand():
    rows = PackedRows.of([2, 1], advantages=[1.0, -1.0, 2.0], response_logprobs=[-2 - LN2, -1.0, -3.0])
    logprobs = torch.tensor([-2 + LN2, -1 - LN2, -3.0], requires_grad=True)  # ratios 4, 1/2 and 1
    loss_sum, metrics = PolicyLoss(correction=TruncatedImportance(cap=2.0))(logprobs, rows)
    assert loss_sum.item() == pytest.approx(-2 * 1 + 0.5 * 1 - 1 * 2)
    assert torch.autograd.grad(loss_sum, logprobs)[0].tolist() == pytest.approx(
        [-2.0, 0.5, -2.0]
    )  # -w A
    assert numbers(metrics) == pytest.approx(
        {
            "clip_fraction": 0.0,
            "approx_kl": 0.0,  # the policy is compared with itself
            "generator_kl_k1": -(2 * LN2 - LN2) / 3,
            "generator_kl_k3": ((4 - 1 - 2 * LN2) + (0.5 - 1 + LN2)) / 3,
            "mean_generator_ratio": 5.5 / 3,
            "mean_importance_weight": 3.5 / 3,
            "truncated_fraction": 1 / 3,
            "masked_fraction": 0.0,
            "max_generator_ratio": 4.0,
            "masked_tokens": 0.0,
            "masked_rows": 0.0,
        },
        abs=1e-6,
    )


def test_decoupled_ppo_by_hand():
    rows = PackedRows.of(
        [3],
        advantages=[1.0, 1.0, -1.0],
        response_logprobs=[-1 - LN2, -1.0, -1.0],
        old_logprobs=[-1.0, -1 - LN2, -1.0],
    )
    logprobs = torch.tensor([-1 + LN2, -1 - LN2, -1 - LN2], requires_grad=True)
    # current / trainer: 2 (clipped to 1.2), 1, 1/2 (clipped to 0.8 for its negative advantage);
    # trainer / generator: 2, 1/2, 1
    loss_sum, metrics = PolicyLoss(old="old_logprobs", correction=TruncatedImportance(cap=1.5))(
        logprobs, rows
    )
    assert loss_sum.item() == pytest.approx(-1.5 * 1.2 - 0.5 * 1.0 + 1.0 * 0.8)
    assert torch.autograd.grad(loss_sum, logprobs)[0].tolist() == pytest.approx([0.0, -0.5, 0.0])
    assert metrics["clip_fraction"].value == pytest.approx(2 / 3)
    assert metrics["mean_generator_ratio"].value == pytest.approx(
        3.5 / 3
    )  # the trainer's, not the current policy's


def test_rejection_by_hand_and_its_counts():
    rows = PackedRows.of(
        [2, 2, 1],
        advantages=[1.0] * 5,
        response_logprobs=[-1 - 2 * LN2, -1, -1, -1, -1 + 3 * LN2],
        response_mask=[1, 1, 1, 0, 1],
    )
    logprobs = torch.full((5,), -1.0, requires_grad=True)
    cases: list[tuple[Level, list[int], int]] = [
        ("token", [0, -1, -1, 0, 0], 2),
        ("sequence", [0, 0, -1, 0, 0], 3),
    ]
    for level, expected, tokens in cases:
        loss = PolicyLoss(
            surrogate=Clipped(low=0.9, high=9.0), correction=Rejection(keep=(0.5, 2.0), level=level)
        )
        loss_sum, metrics = loss(logprobs, rows)
        assert torch.autograd.grad(loss_sum, logprobs)[0].tolist() == pytest.approx(expected)
        assert loss.count(rows) == 4  # dropped tokens still count
        found = numbers(metrics)
        assert found["masked_fraction"] == tokens / 4 and found["masked_tokens"] == tokens
        assert found["masked_rows"] == (1 if level == "token" else 2)


def test_divergences_of_opposite_gaps_do_not_cancel():
    log_ratio = torch.tensor([0.5, -0.5, 0.1, 0.0], dtype=torch.float64)
    rows = PackedRows.of([2, 2])
    over = {"token": [0, 0, 1, 1], "sum": [0, 0, 1, 1], "mean": [0, 0, 1, 1], "max": [0, 0, 1, 1]}
    for extent, expected in over.items():
        limit = {"sum": 0.24, "mean": 0.12}.get(extent, 0.12)
        correction = DivergenceRejection(limit=limit, estimator=k2, over=extent)  # pyright: ignore
        weights, truncated, masked = correction(log_ratio, rows)
        assert weights.tolist() == expected and not truncated.any(), extent
        assert isinstance(correction, Correction) and masked.tolist() == [not w for w in expected]
    assert Rejection(keep=(0.9, 1.1), level="sequence")(log_ratio, rows)[0].tolist()[:2] == [1, 1]


@pytest.mark.parametrize("over", ["token", "sum", "mean", "max"])
@pytest.mark.parametrize("estimator", [k2, k3, absolute])
def test_divergence_rejection_against_loops(over: Any, estimator: Any):
    """The limit is between the estimates of two rows or tokens, so that some are kept."""
    _logprobs, rows = random_rows(seed=3, spread=0.6)
    values = {
        k2: lambda d: d * d / 2,
        k3: lambda d: math.exp(d) - 1 - d,  # of KL(generator || trainer)
        absolute: abs,
    }[estimator]
    log_ratio = rows.only_trained(rows["old_logprobs"] - rows["response_logprobs"])
    found: dict[int, float] = {}
    for tokens in tokens_of_rows(rows):
        own = [values(log_ratio[t].item()) for t in tokens]
        whole = {"sum": sum(own), "mean": sum(own) / max(1, len(own)), "max": max(own, default=0.0)}
        for t, each in zip(tokens, own, strict=True):
            found[t] = whole.get(over, each)
    ordered = sorted(set(found.values()))
    limit = (ordered[0] + ordered[1]) / 2
    weights, _, masked = DivergenceRejection(limit=limit, estimator=estimator, over=over)(
        log_ratio, rows
    )
    assert {t: weights[t].item() for t in found} == {t: float(v <= limit) for t, v in found.items()}
    assert 0 < sum(masked[t].item() for t in found) < len(found)
    dirty = torch.where(log_ratio == log_ratio[next(iter(found))], torch.nan, log_ratio)
    assert DivergenceRejection(limit=100.0, estimator=estimator, over=over)(dirty, rows)[2].any()


# Against the formulas


@pytest.mark.parametrize(
    ("loss", "old"), [(loss, old) for loss in LOSSES for old in (True, False) if old or not loss.old]
)
def test_every_combination_against_the_papers_formula(loss: PolicyLoss, old: bool):
    logprobs, rows = random_rows(old=old)
    loss_sum, metrics = loss(logprobs, rows)
    mine, expected = loss_sum / loss.count(rows), reference(loss, logprobs, rows)
    torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-6)
    (mine_grad,), (expected_grad,) = (torch.autograd.grad(value, logprobs) for value in (mine, expected))
    torch.testing.assert_close(mine_grad, expected_grad, atol=1e-6, rtol=1e-6)
    weights = reference_weights(loss, logprobs, rows)
    assert metrics["mean_importance_weight"].value == pytest.approx(sum(weights.values()) / len(weights))
    assert metrics["masked_tokens"].value == sum(w == 0 for w in weights.values())


def test_the_kl_estimates_are_right_on_average():
    torch.manual_seed(0)
    generator, trainer = (torch.log_softmax(torch.randn(6, dtype=torch.float64), 0) for _ in range(2))
    exact = (generator.exp() * (generator - trainer)).sum().item()
    drawn = torch.multinomial(generator.exp(), 200_000, replacement=True)
    rows = PackedRows.of(
        [len(drawn)], advantages=torch.zeros(len(drawn)), response_logprobs=generator[drawn]
    )
    _, metrics = PolicyLoss()(trainer[drawn], rows)
    assert metrics["generator_kl_k1"].value == pytest.approx(exact, rel=0.02)
    assert metrics["generator_kl_k3"].value == pytest.approx(exact, rel=0.02)
    assert metrics["mean_generator_ratio"].value == pytest.approx(1.0, rel=0.02)


def test_weighing_makes_the_gradient_that_of_the_trainer_on_average():
    """For tokens from a truncated, older distribution, the weighted gradient is the on-policy
    gradient on its support."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    trainer, advantages = torch.log_softmax(logits, 0), torch.randn(6, dtype=torch.float64)
    generator = torch.log_softmax(torch.randn(6, dtype=torch.float64), 0)
    rows = PackedRows.of([1] * 6, advantages=advantages, response_logprobs=generator)
    loss = PolicyLoss(correction=TruncatedImportance(cap=1e6))
    losses = torch.stack([loss(trainer[[k]], of_one(rows, k))[0] for k in range(len(rows))])
    weighted = (generator.exp() * losses).sum()  # the expectation over the generator's tokens
    on_policy = -(trainer.exp() * advantages).sum()
    mine, expected = (
        torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (weighted, on_policy)
    )
    torch.testing.assert_close(mine, expected)


def of_one(rows: PackedRows, k: int) -> PackedRows:
    return PackedRows.of([1], **{name: values[[k]] for name, values in rows.columns.items()})


# Properties


@pytest.mark.parametrize("corrections", CORRECTIONS, ids=range(len(CORRECTIONS)))
@pytest.mark.parametrize("old", ["old_logprobs", None])
def test_where_trainer_and_generator_agree_nothing_changes(
    corrections: tuple[Correction, ...], old: str | None
):
    logprobs, rows = random_rows()
    rows = PackedRows(rows.cu_seqlens, {**rows.columns, "old_logprobs": rows["response_logprobs"]})
    if not any(c.weighs for c in corrections):  # without old_logprobs, the current policy is the trainer
        rows = PackedRows(
            rows.cu_seqlens,
            {n: logprobs.detach() if n.endswith("_logprobs") else v for n, v in rows.columns.items()},
        )
    results = []
    for correction in (corrections, ()):
        loss_sum, metrics = PolicyLoss(old=old, correction=correction)(logprobs, rows)
        results.append((loss_sum.item(), torch.autograd.grad(loss_sum, logprobs)[0].tolist()))
        for name, value in numbers(metrics).items() if correction else ():
            if name.startswith(("generator_kl", "masked", "truncated")):
                assert value == 0
            elif name.startswith(("mean_", "max_")):
                assert value == 1
    assert results[0] == results[1]  # bit by bit


def test_without_a_correction_the_loss_is_unchanged():
    logprobs, rows = random_rows()
    watching, _ = PolicyLoss(old="old_logprobs")(logprobs, rows)
    blind = PackedRows(
        rows.cu_seqlens, {n: v for n, v in rows.columns.items() if n != "response_logprobs"}
    )
    plain_loss, metrics = PolicyLoss(old="old_logprobs")(logprobs, blind)
    assert watching.item() == plain_loss.item() and set(metrics) == {"clip_fraction", "approx_kl"}
    assert PolicyLoss() == PolicyLoss(correction=()) and PolicyLoss().reads == (
        "advantages",
        "response_logprobs",
    )


@pytest.mark.parametrize("corrections", CORRECTIONS, ids=range(len(CORRECTIONS)))
def test_no_gradient_flows_through_a_weight(corrections: tuple[Correction, ...]):
    log_ratio = torch.linspace(-1, 1, 15, dtype=torch.float64, requires_grad=True)
    assert not combined(corrections, log_ratio, PackedRows.of(LENGTHS))[0].requires_grad
    _, rows = random_rows()
    fixed = {name: v.clone().requires_grad_(v.is_floating_point()) for name, v in rows.columns.items()}
    logprobs, _ = random_rows()
    loss_sum, _ = PolicyLoss(old="old_logprobs", correction=corrections)(
        logprobs, PackedRows(rows.cu_seqlens, fixed)
    )
    assert torch.autograd.grad(loss_sum, fixed["response_logprobs"], allow_unused=True)[0] is None


@pytest.mark.parametrize("loss", LOSSES, ids=range(len(LOSSES)))
def test_sums_counts_and_metrics_add_up_over_microbatches_in_any_order(loss: PolicyLoss):
    logprobs, rows = random_rows()
    whole, whole_metrics = loss(logprobs, rows)
    total, count, parts = torch.zeros((), dtype=torch.float64), 0.0, []
    for order in ([3], [0, 5], [2], [4, 1]):
        part = of_rows(rows, logprobs, order)
        part_sum, metrics = loss(*part)
        total, count = total + part_sum, count + loss.count(part[1])
        parts.append(metrics)
    torch.testing.assert_close(total, whole)
    assert count == loss.count(rows) and numbers(merge(parts)) == pytest.approx(numbers(whole_metrics))
    gradients = [torch.autograd.grad(value, logprobs)[0] for value in (total, whole)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("loss", LOSSES, ids=range(len(LOSSES)))
def test_masked_tokens_have_no_gradient_and_may_hold_anything(loss: PolicyLoss):
    logprobs, rows = random_rows()
    clean, clean_metrics = loss(logprobs, rows)
    masked = rows["response_mask"] == 0
    poisoned = {
        n: torch.where(masked, torch.nan, v) if v.is_floating_point() else v
        for n, v in rows.columns.items()
    }
    dirty, metrics = loss(logprobs, PackedRows(rows.cu_seqlens, poisoned))
    assert dirty.item() == clean.item() and metrics == clean_metrics
    (gradient,) = torch.autograd.grad(dirty, logprobs)
    assert (gradient[masked] == 0).all() and gradient.isfinite().all()


@pytest.mark.parametrize("lengths", [[0, 0], [0], []])
def test_empty_responses_cost_nothing(lengths: list[int]):
    none = torch.zeros(0)
    rows = PackedRows.of(lengths, advantages=none, response_logprobs=none, old_logprobs=none)
    for loss in LOSSES:
        logprobs = torch.zeros(0, requires_grad=True)
        loss_sum, metrics = loss(logprobs, rows)
        assert loss_sum.item() == 0 and loss.count(rows) == 0
        assert torch.autograd.grad(loss_sum, logprobs)[0].tolist() == []
        assert "max_generator_ratio" not in metrics and metrics["masked_rows"].value == 0


def test_all_masked_is_zero_with_zero_gradient():
    logprobs, rows = random_rows()
    nothing = PackedRows(rows.cu_seqlens, {**rows.columns, "response_mask": torch.zeros(sum(LENGTHS))})
    for loss in LOSSES:
        loss_sum, metrics = loss(logprobs, nothing)
        assert loss_sum.item() == 0 and torch.autograd.grad(loss_sum, logprobs)[0].abs().max() == 0
        assert metrics["masked_tokens"].value == metrics["masked_rows"].value == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_ratio_beyond_all_bounds_stays_finite(level: Any):
    rows = PackedRows.of(
        [2], advantages=[1.0, 1.0], response_logprobs=[-1000.0, -1.0], old_logprobs=[-1.0, -1.0]
    )
    both = (TruncatedImportance(cap=3.0, level=level), Rejection(level=level))
    for correction, weight in ((both[0], 3.0), (both, 0.0)):
        logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
        loss_sum, metrics = PolicyLoss(correction=correction)(logprobs, rows)
        loss_sum.backward()
        assert logprobs.grad is not None and logprobs.grad[0].item() == -weight
        assert all(math.isfinite(value) for value in numbers(metrics).values())
        assert metrics["max_generator_ratio"].value == pytest.approx(math.exp(20), rel=1e-5)


def test_kl_penalty_and_entropy_bonus_are_not_weighed():
    from weft.algorithms.kl import KlPenalty

    logprobs, rows = random_rows()
    rows = PackedRows(
        rows.cu_seqlens,
        {**rows.columns, "reference_logprobs": rows["old_logprobs"], "entropy": logprobs.abs()},
    )
    nothing_left = Rejection(keep=(1.0, 1.0))
    extra: dict[str, Any] = {
        "kl": KlPenalty(coefficient=0.1),
        "entropy_coefficient": 0.01,
        "old": "old_logprobs",
    }
    no_advantages = PackedRows(
        rows.cu_seqlens, {**rows.columns, "advantages": torch.zeros(sum(LENGTHS))}
    )
    assert PolicyLoss(correction=nothing_left, **extra)(logprobs, rows)[0].item() == pytest.approx(
        PolicyLoss(**extra)(logprobs, no_advantages)[0].item()
    )


# Settings


def test_the_columns_of_a_loss_depend_on_its_correction():
    weighing, choosing = TruncatedImportance(), Rejection()
    assert PolicyLoss().may_read == ("response_mask",)
    assert PolicyLoss(old="old_logprobs").may_read == ("response_mask", "response_logprobs")
    assert PolicyLoss(correction=weighing).reads == ("advantages", "response_logprobs")
    assert PolicyLoss(correction=weighing).may_read == ("response_mask", "old_logprobs")
    assert PolicyLoss(correction=choosing).reads == ("advantages", "response_logprobs")
    assert PolicyLoss(correction=choosing).may_read == ("response_mask",)
    decoupled = PolicyLoss(old="old_logprobs", correction=(weighing, choosing))
    assert decoupled.reads == ("advantages", "old_logprobs", "response_logprobs")
    assert decoupled.may_read == ("response_mask",)


def test_wrong_settings_are_refused_where_they_are_made():
    with pytest.raises(UserError, match=r"TruncatedImportance\.cap: .*greater than 0, not 0\.0"):
        TruncatedImportance(cap=0.0)
    with pytest.raises(UserError, match=r"TruncatedImportance\.cap"):
        TruncatedImportance(cap=math.inf)
    with pytest.raises(UserError, match=r"floor must be at most cap, which is 0\.5, not 0\.6"):
        TruncatedImportance(cap=0.5, floor=0.6)
    with pytest.raises(UserError, match=r"'token', 'sequence' or 'geometric', not 'sample'"):
        TruncatedImportance(level="sample")  # pyright: ignore[reportArgumentType]
    for keep in ((1.5, 2.0), (0.5, 0.5), (-1.0, 2.0), (math.nan, 2.0), (0.5, math.nan)):
        with pytest.raises(UserError, match=r"Rejection\.keep\.[01]"):
            Rejection(keep=keep)
    with pytest.raises(UserError, match=r"no setting 'low' \(value 0\.5\); set keep=\(low, high\)"):
        Rejection(low=0.5)  # pyright: ignore[reportCallIssue]
    with pytest.raises(
        UserError, match=r"adds up the gaps .* compare with the trainer's own: old='old_logprobs'"
    ):
        PolicyLoss(old="response_logprobs", ratio=sequence_ratio)
    with pytest.raises(UserError, match="the clipped ratio already includes"):
        PolicyLoss(old="response_logprobs", correction=TruncatedImportance())
    with pytest.raises(UserError, match="only one correction may weigh"):
        PolicyLoss(correction=(TruncatedImportance(), TruncatedImportance(level="sequence")))
    with pytest.raises(UserError, match=r"make a value of it: Rejection\(\)"):
        PolicyLoss(correction=Rejection)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"PolicyLoss\.correction"):
        PolicyLoss(correction="tis")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="reads column 'response_logprobs'"):
        PolicyLoss(old="old_logprobs", correction=Rejection())(
            torch.zeros(1), PackedRows.of([1], advantages=[1.0], old_logprobs=[0.0])
        )


def test_a_correction_that_returns_something_else_is_named():
    class WeightsAlone(TruncatedImportance):
        def __call__(self, log_ratio: torch.Tensor, rows: PackedRows) -> Any:
            return super().__call__(log_ratio, rows)[0]

    with pytest.raises(
        UserError, match=r"WeightsAlone returned a Tensor; .* \(weights, truncated, masked\)"
    ):
        combined([WeightsAlone()], torch.zeros(3), PackedRows.of([3]))
