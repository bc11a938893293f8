"""Preference losses: numbers by hand, a plain float64 reference with gradients, and shared
properties."""

import math
from typing import Any

import pytest
import torch

from weft.algorithms.loss import Loss, PackedRows
from weft.algorithms.preference_loss import (
    ApoDown,
    ApoZero,
    ClassifierLoss,
    DesirabilityLoss,
    DiscoPop,
    DivergenceRatio,
    Exo,
    Hinge,
    Logistic,
    LogLikelihood,
    LogOdds,
    LogRatio,
    NoiseContrastive,
    PreferenceLoss,
    RobustLogistic,
    Sppo,
    Squared,
    bradley_terry,
)
from weft.dataflow.errors import UserError
from weft.dataflow.metrics import Mean

LENGTHS = [3, 1, 5, 2, 4, 2]
GROUPS = [9, 4, 4, 9, 7, 7]
PREFERRED = [1, 0, 1, 0, 0, 1]


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x).log()


def dpo(w: torch.Tensor, r: torch.Tensor, **_: Any) -> torch.Tensor:
    return -log_sigmoid(0.1 * (w - r))


def cdpo(w: torch.Tensor, r: torch.Tensor, **_: Any) -> torch.Tensor:
    return -0.8 * log_sigmoid(0.1 * (w - r)) - 0.2 * log_sigmoid(-0.1 * (w - r))


def robust(w: torch.Tensor, r: torch.Tensor, **_: Any) -> torch.Tensor:
    return (-0.8 * log_sigmoid(0.1 * (w - r)) + 0.2 * log_sigmoid(-0.1 * (w - r))) / 0.6


def orpo(w: torch.Tensor, r: torch.Tensor, nll: torch.Tensor) -> torch.Tensor:
    p, q = w.exp(), r.exp()
    return nll - 0.25 * log_sigmoid((p / (1 - p) / (q / (1 - q))).log())


def nca(w: torch.Tensor, r: torch.Tensor, **_: Any) -> torch.Tensor:
    w, r = 0.1 * w, 0.1 * r
    return -log_sigmoid(w) - 0.5 * log_sigmoid(-w) - 0.5 * log_sigmoid(-r)


def discopop(w: torch.Tensor, r: torch.Tensor, **_: Any) -> torch.Tensor:
    z = 0.1 * (w - r)
    gate = torch.sigmoid(z / 0.2)
    return (1 - gate) * -log_sigmoid(z) + gate * torch.exp(-z)


def exo(w: torch.Tensor, r: torch.Tensor, **_: Any) -> torch.Tensor:
    """KL(p || label) of the two outcomes "w wins" and "r wins"."""
    p = torch.stack([torch.sigmoid(0.1 * (w - r)), torch.sigmoid(0.1 * (r - w))])
    return (p * (p / torch.tensor([0.8, 0.2], dtype=torch.float64)).log()).sum()


CASES: dict[str, tuple[PreferenceLoss, Any, bool, bool]] = {
    # loss, the paper's formula for a pair, reads the reference, scores are means
    "dpo": (PreferenceLoss(), dpo, True, False),
    "cdpo": (PreferenceLoss(comparison=Logistic(label_smoothing=0.2)), cdpo, True, False),
    "robust": (PreferenceLoss(comparison=RobustLogistic(label_smoothing=0.2)), robust, True, False),
    "ipo": (
        PreferenceLoss(beta=1, score=LogRatio(per_token=True), comparison=Squared(tau=0.3)),
        lambda w, r, **_: (w - r - 1 / 0.6) ** 2,
        True,
        True,
    ),
    "hinge": (
        PreferenceLoss(comparison=Hinge()),
        lambda w, r, **_: torch.relu(1 - 0.1 * (w - r)),
        True,
        False,
    ),
    "simpo": (
        PreferenceLoss(beta=2, score=LogLikelihood(per_token=True), margin=0.5),
        lambda w, r, **_: -log_sigmoid(2 * w - 2 * r - 0.5),
        False,
        True,
    ),
    "orpo": (PreferenceLoss(beta=1, score=LogOdds(), weight=0.25, likelihood=1), orpo, False, True),
    "apo zero": (
        PreferenceLoss(comparison=ApoZero()),
        lambda w, r, **_: 1 - torch.sigmoid(0.1 * w) + torch.sigmoid(0.1 * r),
        True,
        False,
    ),
    "apo down": (
        PreferenceLoss(comparison=ApoDown()),
        lambda w, r, **_: torch.sigmoid(0.1 * w) + 1 - torch.sigmoid(0.1 * w - 0.1 * r),
        True,
        False,
    ),
    "nca": (PreferenceLoss(comparison=NoiseContrastive()), nca, True, False),
    "discopop": (PreferenceLoss(comparison=DiscoPop(temperature=0.2)), discopop, True, False),
    "f-dpo js": (
        PreferenceLoss(score=DivergenceRatio(divergence="js")),
        lambda w, r, **_: dpo(*((2 * u.exp() / (1 + u.exp())).log() for u in (w, r))),
        True,
        False,
    ),
    "f-dpo forward": (
        PreferenceLoss(score=DivergenceRatio(divergence="forward_kl")),
        lambda w, r, **_: dpo(-1 / w.exp(), -1 / r.exp()),
        True,
        False,
    ),
    "exo": (PreferenceLoss(comparison=Exo(label_smoothing=0.2)), exo, True, False),
    "sppo": (
        PreferenceLoss(beta=1, comparison=Sppo(eta=3)),
        lambda w, r, **_: (w - 1.5) ** 2 + (r + 1.5) ** 2,
        True,
        False,
    ),
    "cpo": (
        PreferenceLoss(score=LogLikelihood(), likelihood=1),
        lambda w, r, nll: nll + dpo(w, r),
        False,
        False,
    ),
    "rpo": (PreferenceLoss(likelihood=0.5), lambda w, r, nll: dpo(w, r) + 0.5 * nll, True, False),
}
EVERY: dict[str, Loss] = {
    **{name: case[0] for name, case in CASES.items()},
    "kto": DesirabilityLoss(beta=0.7),
    "bco": ClassifierLoss(beta=0.7),
    "ld-dpo": PreferenceLoss(score=LogRatio(beyond=0.3)),
    "wpo": PreferenceLoss(on_policy=True),
}


def random_rows(seed: int = 0) -> tuple[torch.Tensor, PackedRows]:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)
    logprobs = -2 + 0.5 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(num_tokens, generator=generator) < 0.7
    mask[::3] = True
    columns = {
        "group_id": GROUPS,
        "preferred": torch.tensor(PREFERRED, dtype=torch.uint8),
        "reference_logprobs": logprobs + noise,
        "reference_point": [0.25] * len(LENGTHS),
        "log_collisions": logprobs.detach() + 0.2 + 2 * noise,
        "response_mask": mask.to(torch.uint8),
    }
    return logprobs.requires_grad_(), PackedRows.of(LENGTHS, **columns)


def value_and_gradient(
    loss: Loss, logprobs: torch.Tensor, rows: PackedRows
) -> tuple[float, torch.Tensor]:
    total, _ = loss(logprobs, rows)
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.item(), gradient


def of_row(values: torch.Tensor, rows: PackedRows, row: int) -> torch.Tensor:
    tokens = slice(int(rows.cu_seqlens[row]), int(rows.cu_seqlens[row + 1]))
    return values[tokens][rows["response_mask"][tokens] > 0]


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_papers(name: str):
    loss, formula, reads_reference, mean = CASES[name]
    logprobs, rows = random_rows()
    expected = torch.zeros((), dtype=torch.float64)
    for group in sorted(set(GROUPS)):
        both = [k for k in range(6) if GROUPS[k] == group]
        chosen, rejected = sorted(both, key=lambda k: -PREFERRED[k])
        compared = logprobs - rows["reference_logprobs"] if reads_reference else logprobs
        w, r = (of_row(compared, rows, k) for k in (chosen, rejected))
        w, r = (w.mean(), r.mean()) if mean else (w.sum(), r.sum())
        expected = expected + formula(w, r, nll=-of_row(logprobs, rows, chosen).mean())
    (gradient,) = torch.autograd.grad(expected, logprobs)
    value, mine = value_and_gradient(loss, logprobs, rows)
    assert value == pytest.approx(expected.item(), rel=1e-6) and loss.count(rows) == 3
    torch.testing.assert_close(mine, gradient, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("beyond", [0.0, 0.3])
def test_tokens_beyond_the_shorter_response_count_less(beyond: float):
    logprobs, rows = random_rows()
    expected = torch.zeros((), dtype=torch.float64)
    for group in sorted(set(GROUPS)):
        both = sorted((k for k in range(6) if GROUPS[k] == group), key=lambda k: -PREFERRED[k])
        w, r = (of_row(logprobs - rows["reference_logprobs"], rows, k) for k in both)
        length = min(len(w), len(r))
        expected = expected + dpo(
            *(each[:length].sum() + beyond * each[length:].sum() for each in (w, r))
        )
    (gradient,) = torch.autograd.grad(expected, logprobs)
    loss = PreferenceLoss(score=LogRatio(beyond=beyond))
    value, mine = value_and_gradient(loss, logprobs, rows)
    assert value == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(mine, gradient, atol=1e-7, rtol=1e-6)
    assert value != value_and_gradient(PreferenceLoss(), logprobs, rows)[0]
    with pytest.raises(UserError, match=r"beyond must be 1, not 0\.5"):
        LogRatio(per_token=True, beyond=0.5)


def test_wpo_weighs_a_pair_by_how_likely_the_policy_samples_it():
    loss = PreferenceLoss(on_policy=True, likelihood=0.5)
    logprobs, rows = random_rows()
    expected, weights = torch.zeros((), dtype=torch.float64), []
    for group in sorted(set(GROUPS)):
        both = [k for k in range(6) if GROUPS[k] == group]
        chosen, rejected = sorted(both, key=lambda k: -PREFERRED[k])
        w, r = (of_row(logprobs - rows["reference_logprobs"], rows, k).sum() for k in (chosen, rejected))
        aligned = logprobs.detach() - rows["log_collisions"]
        weight = min(1.0, math.exp(sum(of_row(aligned, rows, k).mean().item() for k in both)))
        nll = -of_row(logprobs, rows, chosen).mean()
        expected, weights = expected + weight * dpo(w, r) + 0.5 * nll, [*weights, weight]
    assert len({*weights}) > 1 and min(weights) < 0.9
    (gradient,) = torch.autograd.grad(expected, logprobs)
    value, mine = value_and_gradient(loss, logprobs, rows)
    assert value == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(mine, gradient, atol=1e-7, rtol=1e-6)
    found = loss(logprobs, rows)[1]["policy_weight"]
    assert isinstance(found, Mean) and found.value == pytest.approx(sum(weights) / 3)


def test_wpo_by_hand():
    columns = {"group_id": [4, 4], "preferred": [1, 0], "reference_logprobs": [-1.0, -1.0]}
    # w = 0.5 / 0.8 for each response: the policy samples another token more often
    logprobs = torch.tensor([0.5, 0.5]).log()
    rows = PackedRows.of([1, 1], **columns, log_collisions=torch.tensor([0.8, 0.8]).log())
    total, _ = PreferenceLoss(on_policy=True)(logprobs, rows)
    assert total.item() == pytest.approx(0.390625 * math.log(2))
    rows = PackedRows.of([1, 1], **columns, log_collisions=torch.tensor([0.1, 0.1]).log())
    assert PreferenceLoss(on_policy=True)(logprobs, rows)[0].item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("z", [-3000.0, -90.0, 90.0, 3000.0])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_discopop_stays_finite_for_pairs_in_the_wrong_order(z: float, temperature: float):
    ahead = torch.tensor([z], requires_grad=True)
    [loss] = DiscoPop(temperature=temperature)(ahead)
    [slope] = torch.autograd.grad(loss, ahead)
    logistic = max(0.0, -z) if temperature < 1 else max(0.0, -z) + (z < 0)
    assert loss.item() == pytest.approx(logistic, abs=1e-6) and slope.isfinite()


def test_exo_has_the_minimum_of_the_labels_and_little_gradient_far_from_it():
    odds = math.log(0.75 / 0.25)
    ahead = torch.tensor([odds, -40.0, 0.0], dtype=torch.float64, requires_grad=True)
    losses = Exo(label_smoothing=0.25)(ahead)
    (slope,) = torch.autograd.grad(losses.sum(), ahead)
    assert losses[0].item() == pytest.approx(0) and slope[0].item() == pytest.approx(0)
    assert losses[1].item() == pytest.approx(math.log(4)) and abs(slope[1].item()) < 1e-14
    assert slope[2].item() == pytest.approx(-odds / 4)  # sigmoid'(0) (0 - log 3)


def test_sppo_by_hand():
    columns = {"group_id": [4, 4], "preferred": [1, 0], "reference_logprobs": [-1.0, -1.0]}
    rows = PackedRows.of([1, 1], **columns)
    logprobs = torch.tensor([-0.5, -2.0])  # log-ratios 0.5 and -1
    loss = PreferenceLoss(beta=1, comparison=Sppo(eta=4))
    assert loss(logprobs, rows)[0].item() == pytest.approx(1.5**2 + 1.0**2)
    with pytest.raises(UserError, match=r"compares no difference, so margin must be 0, not 1"):
        PreferenceLoss(comparison=Sppo(), margin=1)


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        (DesirabilityLoss, lambda ahead: 1 - torch.sigmoid(ahead)),
        (ClassifierLoss, lambda ahead: -torch.sigmoid(ahead).log()),
    ],
)
def test_good_and_bad_responses_have_weights_of_their_own(kind: Any, formula: Any):
    loss = kind(beta=0.7, weights=(2, 0.5))
    logprobs, rows = random_rows()
    expected = torch.zeros((), dtype=torch.float64)
    for k in range(6):
        above = 0.7 * (of_row(logprobs - rows["reference_logprobs"], rows, k).sum() - 0.25)
        expected = expected + (2 * formula(above) if PREFERRED[k] else 0.5 * formula(-above))
    (gradient,) = torch.autograd.grad(expected, logprobs)
    value, mine = value_and_gradient(loss, logprobs, rows)
    assert value == pytest.approx(expected.item(), rel=1e-6) and loss.count(rows) == 6
    torch.testing.assert_close(mine, gradient, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_masked_values_change_nothing(name: str):
    loss = EVERY[name]
    logprobs, rows = random_rows()
    masked = rows["response_mask"] == 0
    poisoned = torch.where(masked, math.nan, rows["reference_logprobs"])
    other = PackedRows(rows.cu_seqlens, {**rows.columns, "reference_logprobs": poisoned})
    value, gradient = value_and_gradient(loss, logprobs, rows)
    again, same = value_and_gradient(
        loss, torch.where(masked, math.nan, logprobs).detach().requires_grad_(), other
    )
    assert again == value and torch.equal(same, gradient) and (gradient[masked] == 0).all()


@pytest.mark.parametrize("name", EVERY)
def test_rows_without_a_trained_token_count_for_nothing(name: str):
    loss = EVERY[name]
    logprobs, rows = random_rows()
    nothing = PackedRows(rows.cu_seqlens, {**rows.columns, "response_mask": torch.zeros(sum(LENGTHS))})
    value, gradient = value_and_gradient(loss, logprobs, nothing)
    assert value == 0 and (gradient == 0).all() and loss.count(nothing) == 0
    empty = PackedRows.of([], **{c: v[:0] for c, v in rows.columns.items()})
    assert loss.count(empty) == 0 and loss(logprobs[:0], empty)[0].item() == 0


def test_half_a_masked_pair_is_left_out():
    logprobs, rows = random_rows()
    mask = rows["response_mask"].clone()
    mask[int(rows.cu_seqlens[1])] = 0  # the rejected response of group 4
    left = PackedRows(rows.cu_seqlens, {**rows.columns, "response_mask": mask})
    _, gradient = value_and_gradient(PreferenceLoss(likelihood=1), logprobs, left)
    assert (
        PreferenceLoss().count(left) == 2
        and (gradient[left.per_token(left["group_id"] == 4)] == 0).all()
    )


def test_metrics_say_who_is_ahead():
    columns = {"group_id": [1, 1, 2, 2], "preferred": [1, 0, 0, 1], "reference_logprobs": [-1.0] * 4}
    logprobs = torch.tensor([-0.5, -1.5, -3.0, -4.0])
    _, metrics = PreferenceLoss(beta=0.5, likelihood=1)(logprobs, PackedRows.of([1, 1, 1, 1], **columns))
    found = {name: metric.value for name, metric in metrics.items()}
    assert found == pytest.approx(
        {
            "chosen_reward": 0.5 * (0.5 - 3.0) / 2,
            "rejected_reward": 0.5 * (-0.5 - 2.0) / 2,
            "reward_margin": 0.0,
            "preference_accuracy": 0.5,
            "chosen_logprob": -2.25,
            "rejected_logprob": -2.25,
            "chosen_nll": 2.25,
        }
    )


def test_extreme_rewards_stay_finite():
    columns = {"group_id": [1, 1], "preferred": [1, 0], "reference_logprobs": [0.0, -1e4]}
    for name in ("dpo", "cdpo", "robust", "exo", "hinge", "rpo"):
        value, gradient = value_and_gradient(
            EVERY[name], torch.tensor([-1e4, 0.0], requires_grad=True), PackedRows.of([1, 1], **columns)
        )
        assert math.isfinite(value) and torch.isfinite(gradient).all(), name
    certain = torch.tensor([0.0, -2.0], requires_grad=True)  # probability 1: infinite odds
    value, gradient = value_and_gradient(EVERY["orpo"], certain, PackedRows.of([1, 1], **columns))
    assert math.isfinite(value) and torch.isfinite(gradient).all()


def test_groups_that_are_no_pairs_are_named():
    columns = {"group_id": [3, 3, 5, 5], "preferred": [1, 0, 1, 1], "reference_logprobs": [0.0] * 4}
    with pytest.raises(UserError, match="group 5 has 2 rows, 2 of them preferred"):
        PreferenceLoss().count(PackedRows.of([1] * 4, **columns))
    with pytest.raises(UserError, match="group 3 has 3 rows, 1 of them preferred"):
        PreferenceLoss().count(PackedRows.of([1] * 3, group_id=[3, 3, 3], preferred=[1, 0, 0]))


def test_a_margin_may_be_a_column():
    columns = {"group_id": [4, 4, 5, 5], "preferred": [0, 1, 1, 0], "reference_logprobs": [-1.0] * 4}
    rows = PackedRows.of([1] * 4, gap=[0.5, 0.5, 0.5, 0.5], **columns)
    logprobs, loss = torch.tensor([-2.0, -1.0, -0.5, -1.0]), PreferenceLoss(margin="gap")
    assert "gap" in loss.reads and "gap" not in PreferenceLoss().reads
    assert loss(logprobs, rows)[0].item() == PreferenceLoss(margin=0.5)(logprobs, rows)[0].item()


def test_parts_are_values():
    with pytest.raises(UserError, match=r"score=LogOdds is a class; make a value of it: LogOdds\(\)"):
        PreferenceLoss(score=LogOdds)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="comparison"):
        PreferenceLoss(comparison="ipo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"above 0, the share of swapped labels; .* use Logistic\(\)"):
        RobustLogistic()
    assert PreferenceLoss() == PreferenceLoss(score=LogRatio()) != PreferenceLoss(score=LogLikelihood())
    assert isinstance(PreferenceLoss(), Loss) and isinstance(DesirabilityLoss(), Loss)


def test_bradley_terry_by_hand():
    chosen = torch.tensor([2.0, -1e4], requires_grad=True)
    losses = bradley_terry(chosen, torch.tensor([1.0, 1e4]), margin=torch.tensor([0.5, 0.0]))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-0.5)), 2e4])
    assert chosen.grad is not None and chosen.grad.tolist() == pytest.approx(
        [-1 / (1 + math.exp(0.5)), -1.0]
    )
    assert bradley_terry(torch.zeros(0), torch.zeros(0)).tolist() == []
