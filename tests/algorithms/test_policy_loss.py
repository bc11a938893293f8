"""Losses: numbers by hand, a plain float64 reference with gradients, and shared properties."""

import itertools
import math
from typing import Any

import pytest
import torch

from weft.algorithms.aggregation import fixed_length, sequence_mean, token_mean
from weft.algorithms.corrections import Rejection, TruncatedImportance
from weft.algorithms.kl import KlPenalty, k1, k2, k3
from weft.algorithms.loss import Loss, PackedRows
from weft.algorithms.policy_loss import NegativeLogLikelihood, PolicyLoss
from weft.algorithms.surrogates import Clipped, sequence_product, sequence_ratio, token_ratio
from weft.dataflow.errors import UserError
from weft.dataflow.metrics import Mean

LENGTHS = [3, 1, 5, 2, 4]
VARIANTS = [
    PolicyLoss(
        ratio=ratio,
        old=old,
        aggregation=aggregation,
        kl=kl,
        surrogate=Clipped(high=0.3),
        entropy_coefficient=entropy,
    )
    for (ratio, old, aggregation), kl, entropy in itertools.product(
        [
            (token_ratio, None, token_mean),
            (token_ratio, None, sequence_mean),
            (token_ratio, None, fixed_length(6)),
            (sequence_ratio, "old_logprobs", sequence_mean),
        ],
        [
            None,
            KlPenalty(coefficient=0.1),
            KlPenalty(coefficient=0.1, estimator=k2),
            KlPenalty(coefficient=0.1, estimator=k1, weighted=True),
        ],
        [0.0, 0.01],
    )
]


def random_rows(seed: int = 0, *, mask: bool = True) -> tuple[torch.Tensor, PackedRows]:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)
    draw = lambda: torch.randn(num_tokens, generator=generator, dtype=torch.float64)  # noqa: E731
    logprobs = -2 + 0.5 * draw()
    columns = {
        "advantages": draw(),
        "response_logprobs": logprobs + 0.3 * draw(),
        "old_logprobs": logprobs + 0.3 * draw(),
        "reference_logprobs": logprobs + 0.3 * draw(),
        "entropy": draw().abs(),
    }
    if mask:
        columns["response_mask"] = (torch.rand(num_tokens, generator=generator) < 0.7).to(torch.uint8)
        columns["response_mask"][3] = 0  # the second row, with one token, is fully masked
    return logprobs.requires_grad_(), PackedRows.of(LENGTHS, **columns)


def reference(loss: PolicyLoss, logprobs: torch.Tensor, rows: PackedRows) -> Any:
    """Compute the papers' mean, by row and token."""
    kept, start = [], 0
    for length in LENGTHS:
        tokens = [
            t
            for t in range(start, start + length)
            if "response_mask" not in rows or rows["response_mask"][t]
        ]
        start += length
        log_ratios = [logprobs[t] - rows[loss.old or "response_logprobs"][t] for t in tokens]
        if loss.ratio is sequence_ratio and tokens:
            log_ratios = [sum(log_ratios) / len(tokens)] * len(tokens)
        losses = []
        for t, log_ratio in zip(tokens, log_ratios, strict=True):
            r, a = torch.exp(torch.as_tensor(log_ratio)), rows["advantages"][t]
            value = -torch.minimum(r * a, torch.clamp(r, 0.8, 1.3) * a)
            d = logprobs[t] - rows["reference_logprobs"][t]
            if loss.kl:
                estimators = {k1: d, k2: d * d / 2, k3: torch.exp(-d) - 1 + d}
                kl = estimators[loss.kl.estimator]
                if loss.kl.weighted:
                    own = logprobs[t] - rows[loss.old or "response_logprobs"][t]
                    kl = kl * torch.exp(own)
                value = value + loss.kl.coefficient * kl
            assert not isinstance(loss.entropy_coefficient, str)
            losses.append(value - loss.entropy_coefficient * rows["entropy"][t])
        kept.append(losses)
    kept = [losses for losses in kept if losses]
    if loss.aggregation is token_mean:
        return sum(sum(row) for row in kept) / sum(len(row) for row in kept)
    divisors = [len(row) if loss.aggregation is sequence_mean else 6 for row in kept]
    return sum(sum(row) / n for row, n in zip(kept, divisors, strict=True)) / len(kept)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("loss", VARIANTS, ids=range(len(VARIANTS)))
def test_every_variant_against_the_papers_formula(loss: PolicyLoss, masked: bool):
    logprobs, rows = random_rows(mask=masked)
    loss_sum, _ = loss(logprobs, rows)
    mine = loss_sum / loss.count(rows)
    expected = reference(loss, logprobs, rows)
    torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-6)
    (mine_grad,), (expected_grad,) = (torch.autograd.grad(value, logprobs) for value in (mine, expected))
    torch.testing.assert_close(mine_grad, expected_grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "loss", [*VARIANTS[::3], NegativeLogLikelihood(), NegativeLogLikelihood(aggregation=sequence_mean)]
)
def test_sums_and_counts_add_up_over_microbatches_in_any_order(loss: Loss):
    logprobs, rows = random_rows()
    whole, whole_metrics = loss(logprobs, rows)
    total, count, parts = torch.zeros((), dtype=torch.float64), 0.0, []
    for row in (3, 0, 4, 2, 1):
        tokens = slice(int(rows.cu_seqlens[row]), int(rows.cu_seqlens[row + 1]))
        part = PackedRows.of(
            [LENGTHS[row]], **{name: values[tokens] for name, values in rows.columns.items()}
        )
        part_sum, metrics = loss(logprobs[tokens], part)
        total, count = total + part_sum, count + loss.count(part)
        parts.append(metrics)
    torch.testing.assert_close(total, whole)
    assert count == loss.count(rows)
    from weft.dataflow.metrics import merge

    assert {n: m.value for n, m in merge(parts).items()} == pytest.approx(
        {n: m.value for n, m in whole_metrics.items()}
    )


@pytest.mark.parametrize("loss", [*VARIANTS, NegativeLogLikelihood()], ids=range(len(VARIANTS) + 1))
def test_masked_tokens_have_no_gradient_and_may_hold_anything(loss: Loss):
    logprobs, rows = random_rows()
    clean, _ = loss(logprobs, rows)
    masked = rows["response_mask"] == 0
    poisoned = {
        n: torch.where(masked, torch.nan, v) if v.is_floating_point() else v
        for n, v in rows.columns.items()
    }
    impossible = (
        logprobs.detach().masked_fill(masked, -torch.inf).requires_grad_()
    )  # tokens of probability 0
    for given in (logprobs, impossible):
        dirty, metrics = loss(given, PackedRows(rows.cu_seqlens, poisoned))
        assert dirty.item() == clean.item() and all(m.value == m.value for m in metrics.values())
        (gradient,) = torch.autograd.grad(dirty, given)
        assert (gradient[masked] == 0).all() and gradient.isfinite().all()


def of_two_engines(num_tokens: int, gap: float) -> tuple[torch.Tensor, PackedRows, torch.Tensor]:
    """1,000 on-policy rows with small differences between generator and trainer, and token
    advantages."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(1000 * num_tokens, generator=generator)
    other = logprobs + gap * torch.randn(len(logprobs), generator=generator)
    advantages = torch.randn(1000, generator=generator).repeat_interleave(num_tokens)
    rows = PackedRows.of([num_tokens] * 1000, advantages=advantages, response_logprobs=other)
    return logprobs.requires_grad_(), rows, advantages


@pytest.mark.parametrize("scored", [False, True], ids=["one step", "old_logprobs"])
@pytest.mark.parametrize(
    ("loss", "num_tokens"),
    [
        (
            PolicyLoss(
                surrogate=Clipped(low=3e-4, high=4e-4), ratio=sequence_ratio, aggregation=sequence_mean
            ),
            200,
        ),
        (PolicyLoss(ratio=sequence_product, aggregation=sequence_mean), 1000),
    ],
    ids=["GSPO", "RLOO"],
)
def test_no_on_policy_row_of_a_ratio_of_responses_is_lost_to_the_gap_of_two_engines(
    loss: PolicyLoss, num_tokens: int, scored: bool
):
    logprobs, rows, advantages = of_two_engines(num_tokens, gap=0.02)
    if scored:
        rows = PackedRows(rows.cu_seqlens, {**rows.columns, "old_logprobs": logprobs.detach()})
    loss_sum, metrics = loss(logprobs, rows)
    (gradient,) = torch.autograd.grad(loss_sum, logprobs)
    assert (gradient.view(1000, -1).abs().sum(1) > 0).all(), "each row has a gradient"
    assert torch.cosine_similarity(gradient, -advantages, dim=0) >= 0.999
    assert metrics["clip_fraction"].value == 0 and metrics["approx_kl"].value == 0
    assert metrics["generator_kl_k3"].value == pytest.approx(0.02**2 / 2, rel=0.05), (
        "the gap is still watched"
    )


def test_all_masked_is_zero_with_zero_gradient():
    logprobs, rows = random_rows()
    nothing = PackedRows(rows.cu_seqlens, {**rows.columns, "response_mask": torch.zeros(sum(LENGTHS))})
    for loss in (
        PolicyLoss(),
        PolicyLoss(ratio=sequence_ratio, aggregation=sequence_mean),
        NegativeLogLikelihood(),
    ):
        value, _ = loss(logprobs, nothing)
        assert value.item() == 0 and loss.count(nothing) == 0
        assert torch.autograd.grad(value, logprobs)[0].abs().max() == 0


def numbers(metrics: Any) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def test_a_loss_and_its_metrics_by_hand():
    ln2 = math.log(2)
    rows = PackedRows.of(
        [3, 1],
        advantages=[1.0, -1.0, 9.0, 2.0],
        response_logprobs=[-1 - ln2, -1.0, -1.0, -1.0],
        reference_logprobs=[-1.0, -1 - ln2, -1.0, -1.0],
        entropy=[0.5, 1.5, 9.0, 1.0],
        response_mask=[1, 1, 0, 1],
    )
    logprobs = torch.tensor([-1.0, -1 - ln2, -5.0, -1.0], requires_grad=True)  # ratios 2, 1/2 and 1
    loss = PolicyLoss(kl=KlPenalty(coefficient=0.1, estimator=k1), entropy_coefficient=0.2)
    loss_sum, metrics = loss(logprobs, rows)
    # Clipped at 1.2; clipped at 0.8; unclipped. KL 0, 0, 0.
    assert loss_sum.item() == pytest.approx((-1.2 + 0.8 - 2.0) - 0.2 * 3.0)
    assert torch.autograd.grad(loss_sum, logprobs)[0].tolist() == pytest.approx(
        [0.1, 0.1, 0.0, -2.0 + 0.1]
    )
    k3s = (2 - 1 - ln2) + (0.5 - 1 + ln2)  # KL of the generator from the current policy
    assert numbers(metrics) == pytest.approx(
        {
            "clip_fraction": 2 / 3,
            "approx_kl": ((0.5 - 1 + ln2) + (2 - 1 - ln2)) / 3,
            "kl": 0.0,
            "entropy": 1.0,
            "generator_kl_k1": 0.0,
            "generator_kl_k3": k3s / 3,
            "mean_generator_ratio": 3.5 / 3,
            "max_generator_ratio": 2.0,
        },
        abs=1e-6,
    )


def test_entropy_is_watched_where_the_rows_have_it_and_counts_only_where_asked_for():
    rows = PackedRows.of(
        [3], advantages=[1.0] * 3, response_logprobs=[-1.0] * 3, response_mask=[1, 1, 0]
    )
    with_entropy = PackedRows(
        rows.cu_seqlens, {**rows.columns, "entropy": torch.tensor([0.25, 0.75, 9.0])}
    )
    logprobs = torch.full((3,), -1.0)
    for loss, plain in ((PolicyLoss(), -2.0), (NegativeLogLikelihood(), 2.0)):
        value, metrics = loss(logprobs, with_entropy)
        assert value.item() == plain and metrics["entropy"] == Mean(1.0, 2)
        assert "entropy" not in loss(logprobs, rows)[1] and not loss.needs_entropy
    paid = PolicyLoss(entropy_coefficient=0.5)
    assert paid.needs_entropy and paid(logprobs, with_entropy)[0].item() == -2.5
    with pytest.raises(UserError, match="'entropy'"):
        paid(logprobs, rows)
    with pytest.raises(UserError, match="greater than or equal to 0"):
        PolicyLoss(entropy_coefficient=-0.1)


def test_a_ratio_without_bounds_is_held_at_e_to_the_20():
    rows = PackedRows.of([2], advantages=[-1.0, 1.0], response_logprobs=[-1000.0, -1.0])
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss_sum, _ = PolicyLoss()(logprobs, rows)  # negative advantages have no upper clip
    assert loss_sum.item() == pytest.approx(math.exp(20) - 1, rel=1e-6)
    assert torch.autograd.grad(loss_sum, logprobs)[0].tolist() == [0.0, -1.0]


def test_weights_and_masks_of_two_corrections_by_hand():
    ln2 = math.log(2)
    generator = [-1 - ln2, -1.0, -1 + 3 * ln2, -1.0]  # trainer / generator: 2, 1; 1/8; 1
    rows = PackedRows.of([2, 1, 1], advantages=[1.0, -2.0, 3.0, 1.0], response_logprobs=generator)
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    loss = PolicyLoss(correction=(TruncatedImportance(cap=1.5), Rejection(keep=(0.5, 4.0))))
    loss_sum, metrics = loss(logprobs, rows)
    assert loss_sum.item() == pytest.approx(-1.5 + 2.0 - 1.0)  # the second row is dropped
    assert torch.autograd.grad(loss_sum, logprobs)[0].tolist() == pytest.approx([-1.5, 2.0, 0.0, -1.0])
    found = numbers(metrics)
    assert found["truncated_fraction"] == 1 / 4 and found["masked_fraction"] == 1 / 4
    assert found["masked_tokens"] == 1 and found["masked_rows"] == 1


def test_the_generator_is_compared_with_once():
    weighing = TruncatedImportance()
    with pytest.raises(UserError, match="only one correction may weigh"):
        PolicyLoss(correction=(weighing, TruncatedImportance(cap=3.0)))
    cases: tuple[dict[str, Any], ...] = ({"correction": weighing}, {"ratio": sequence_ratio})
    for twice in cases:
        with pytest.raises(UserError, match="old='old_logprobs'"):
            PolicyLoss(old="response_logprobs", **twice)
        assert PolicyLoss(old="old_logprobs", **twice).old == "old_logprobs"


def test_the_columns_of_a_loss_depend_on_its_parts():
    assert PolicyLoss().reads == ("advantages", "response_logprobs")
    with_kl = PolicyLoss(kl=KlPenalty(coefficient=0.1), old="old_logprobs")
    assert with_kl.reads == ("advantages", "old_logprobs", "reference_logprobs")
    for of_responses in (sequence_ratio, sequence_product):
        assert PolicyLoss(ratio=of_responses).reads == ("advantages",), "never the generator's"
        assert "old_logprobs" in PolicyLoss(ratio=of_responses).may_read
    assert NegativeLogLikelihood().reads == ()
    assert isinstance(PolicyLoss(), Loss) and isinstance(NegativeLogLikelihood(), Loss)
    assert PolicyLoss(aggregation=fixed_length(8)) == PolicyLoss(aggregation=fixed_length(8))


def test_a_missing_column_and_a_wrong_setting_are_named():
    logprobs, rows = random_rows()
    with pytest.raises(UserError, match=r"reads column 'older_logprobs'.*did you mean 'old_logprobs'"):
        PolicyLoss(old="older_logprobs")(logprobs, rows)
    with pytest.raises(UserError, match="did you mean 'surrogate'"):
        PolicyLoss(surogate=Clipped())  # pyright: ignore[reportCallIssue]
    with pytest.raises(
        UserError, match=r"surrogate=Clipped is a class; make a value of it: Clipped\(\)"
    ):
        PolicyLoss(surrogate=Clipped)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"PolicyLoss\.surrogate"):
        PolicyLoss(surrogate="cispo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"PolicyLoss\.aggregation"):
        PolicyLoss(aggregation="token_mean")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="greater than 0"):
        KlPenalty(coefficient=0)
    with pytest.raises(UserError, match="at least 1, not 0"):
        fixed_length(0)
