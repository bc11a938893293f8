"""Given tokens (of tools, users, templates, or forced ones) never train: no loss has a gradient
there, and nothing at their places changes a loss or a gradient elsewhere, to the last bit."""

import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

import weft.algorithms
from weft.algorithms.aggregation import episode_mean, fixed_length, sequence_mean, token_mean
from weft.algorithms.corrections import Level, Rejection, TruncatedImportance
from weft.algorithms.distillation import Distillation, ForwardKl, Jsd, ReverseKl
from weft.algorithms.kl import AdaptiveCoefficient, KlPenalty, StraightThrough, absolute, k1, k2, k3
from weft.algorithms.loss import FrozenLoss, Loss, PackedRows
from weft.algorithms.policy_loss import NegativeLogLikelihood, PolicyLoss
from weft.algorithms.preference_loss import (
    DesirabilityLoss,
    Hinge,
    LogLikelihood,
    LogOdds,
    LogRatio,
    PreferenceLoss,
    RobustLogistic,
    Squared,
)
from weft.algorithms.reward_model import RewardLoss, StepLoss
from weft.algorithms.rewards import outcome_rewards, token_rewards
from weft.algorithms.surrogates import (
    Cispo,
    Clipped,
    Dppo,
    PlainPolicyGradient,
    Sapo,
    Unclipped,
    Vespo,
    sequence_product,
    sequence_ratio,
    token_ratio,
)
from weft.algorithms.turns import critic_turn_advantages
from weft.algorithms.values import ValueLoss, critic_advantages, return_advantages
from weft.dataflow.batch import Batch

VOCABULARY = 5
MASKS = [[1, 1, 0, 0, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0], [1, 1], [0, 1, 1]]
"""Rows of sampled (1) and given tokens; one row has only given ones."""
LENGTHS = [len(mask) for mask in MASKS]
MASK = torch.tensor([*itertools.chain(*MASKS)], dtype=torch.uint8)
SURROGATES = [
    Clipped(),
    Clipped(high=0.28, dual=3.0),
    Cispo(),
    Sapo(),
    Vespo(),
    Dppo(penalty=0.1),
    PlainPolicyGradient(),
    Unclipped(),
]
KLS = [None, *(KlPenalty(coefficient=0.1, estimator=e) for e in (k1, k2, k3, absolute))]
KLS.append(KlPenalty(coefficient=0.1, estimator=StraightThrough(k3)))
CORRECTIONS: list[Any] = [()]
for level in get_args(Level):
    CORRECTIONS += [TruncatedImportance(level=level), Rejection(keep=(0.1, 10.0), level=level)]
CORRECTIONS.append((TruncatedImportance(cap=5.0), Rejection(keep=(0.5, 5.0))))
LOSSES: list[Loss] = [
    *(
        PolicyLoss(surrogate=surrogate, aggregation=aggregation, ratio=ratio)
        for surrogate, aggregation, ratio in itertools.product(
            SURROGATES,
            [token_mean, sequence_mean, episode_mean, fixed_length(8)],
            [token_ratio, sequence_ratio, sequence_product],
        )
        if ratio is token_ratio or not isinstance(surrogate, Dppo)
    ),
    *(PolicyLoss(kl=kl, entropy_coefficient=0.01) for kl in KLS),
    *(PolicyLoss(correction=correction) for correction in CORRECTIONS),
    PolicyLoss(old="old_logprobs", correction=TruncatedImportance(level="sequence")),
    *(NegativeLogLikelihood(aggregation=a) for a in (token_mean, sequence_mean, episode_mean)),
    *(ValueLoss(clip=clip, aggregation=a) for clip in (0.2, None) for a in (token_mean, episode_mean)),
    *(
        PreferenceLoss(score=score, comparison=comparison, likelihood=1.0)
        for score in (LogRatio(), LogRatio(per_token=True), LogLikelihood(), LogOdds())
        for comparison in (RobustLogistic(label_smoothing=0.1), Squared(), Hinge())
    ),
    PreferenceLoss(),
    DesirabilityLoss(),
    StepLoss(),
    *(Distillation(divergence=divergence) for divergence in (ReverseKl(), ForwardKl(), Jsd())),
    Distillation(policy=PolicyLoss()),
]


def columns(generator: torch.Generator) -> dict[str, torch.Tensor]:
    def draw(number: int) -> torch.Tensor:
        return torch.randn(number, generator=generator, dtype=torch.float64)

    of_tokens = ("advantages", "values", "returns", "step_labels")
    of_policies = ("response_logprobs", "old_logprobs", "reference_logprobs")
    return {
        **{name: draw(len(MASK)) for name in of_tokens},
        **{name: -1.6 + 0.2 * draw(len(MASK)) for name in of_policies},
        "teacher_logprobs": -1.6 + 0.2 * draw(2 * len(MASK)).view(-1, 2),
    }


def of_rows() -> dict[str, torch.Tensor]:
    """Three pairs, which are also three episodes, with a fully masked row in the second."""
    tokens = [sum(MASKS[k]) + sum(MASKS[k + 1]) for k in (0, 2, 4)]
    return {
        "group_id": torch.tensor([4, 4, 5, 5, 6, 6]),
        "preferred": torch.tensor([1, 0, 0, 1, 1, 0]),
        "reference_point": torch.full((6,), 0.1, dtype=torch.float64),
        "episode_tokens": torch.tensor(tokens).repeat_interleave(2),
        "response_mask": MASK,
        "teacher_ids": torch.arange(2 * len(MASK)).view(-1, 2) % VOCABULARY,
    }


def losses_and_gradients(
    loss: Loss, logits: torch.Tensor, of_tokens: dict[str, torch.Tensor], sampled: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a policy (or critic) with these logits [T, V], and their gradient."""
    logits = logits.clone().requires_grad_()
    distribution = torch.log_softmax(logits, dim=-1)
    rows = PackedRows.of(LENGTHS, **of_tokens, **of_rows())
    if isinstance(loss, ValueLoss | StepLoss):
        output = logits[:, 0]
    else:
        output = distribution.gather(-1, sampled[:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        candidates = distribution.gather(-1, rows["teacher_ids"])
        computed = {"entropy": entropy, "candidate_logprobs": candidates}
        rows = PackedRows(rows.cu_seqlens, {**rows.columns, **computed})
    value = loss(output, rows)[0] / loss.count(rows)
    return value.detach(), torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("loss", LOSSES, ids=range(len(LOSSES)))
def test_a_given_token_never_has_a_gradient(loss: Loss):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(MASK), VOCABULARY, generator=generator, dtype=torch.float64)
    sampled = torch.randint(VOCABULARY, (len(MASK),), generator=generator)
    of_tokens, given = columns(generator), MASK == 0
    value, gradient = losses_and_gradients(loss, logits, of_tokens, sampled)
    assert (gradient[given] == 0).all()
    assert gradient[~given].abs().max() > 0 and value.isfinite()
    for scale in (1.0, 30.0):
        other = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        perturbed = torch.where(given[:, None], logits + scale * other, logits)
        others = {
            name: torch.where(given.view(-1, *[1] * (drawn.ndim - 1)), scale * drawn, of_tokens[name])
            for name, drawn in columns(generator).items()
        }
        tokens = torch.where(given, (sampled + 1) % VOCABULARY, sampled)
        again, other_gradient = losses_and_gradients(loss, perturbed, others, tokens)
        assert again.item() == value.item(), "exactly"
        assert torch.equal(other_gradient, gradient), "exactly, also where the tokens were sampled"


def classes(base: type, module: Any) -> set[type]:
    return {
        c
        for _, c in inspect.getmembers(module, inspect.isclass)
        if issubclass(c, base) and c is not base
    }


def test_every_loss_surrogate_and_kl_estimator_of_weft_is_tried():
    modules = [
        importlib.import_module(f"weft.algorithms.{info.name}")
        for info in pkgutil.iter_modules(weft.algorithms.__path__)
    ]
    found = set().union(*(classes(FrozenLoss, module) for module in modules))
    complete = {c for c in found if "__call__" in vars(c)}
    # A reward model reads the last token of a response, also if a template gave it.
    assert complete - {type(loss) for loss in LOSSES} == {RewardLoss}
    surrogates = importlib.import_module("weft.algorithms.surrogates")
    own = {c for c in classes(object, surrogates) if c.__module__ == surrogates.__name__}
    assert own - {surrogates.Surrogate, surrogates.GeometricRatio} == {type(s) for s in SURROGATES}


# Penalties and returns


def penalized(node: Callable[..., Batch], **others: Any) -> Batch:
    """Return rows with a critic's values, two turns, and a penalty; given tokens hold what `others`
    say."""
    masks = [mask for mask in MASKS if any(mask)]
    draw = torch.Generator().manual_seed(1)
    columns: dict[str, list[list[float]]] = {}
    for name in ("old_logprobs", "reference_logprobs", "values"):
        columns[name] = [torch.randn(len(mask), generator=draw).tolist() for mask in masks]
        for values, mask in zip(columns[name], masks, strict=True):
            values[:] = [
                v if kept else others.get(name, v) for v, kept in zip(values, mask, strict=True)
            ]
    samples = Batch.of(
        reward=[1.0] * len(masks),
        response_ids=[[1] * len(mask) for mask in masks],
        response_mask=masks,
        turn_ends=[[2, len(mask)] for mask in masks],
        **columns,
    )
    coefficient = AdaptiveCoefficient(value=0.5)
    return node(token_rewards(samples, coefficient=coefficient, old="old_logprobs"))


@pytest.mark.pitfall(10)
@pytest.mark.parametrize("node", [critic_advantages, critic_turn_advantages, return_advantages])
@pytest.mark.parametrize("whiten", [True, False])
def test_a_penalty_on_given_tokens_is_never_summed_into_returns(node: Any, whiten: bool):
    def run(samples: Batch) -> Batch:
        return node(samples, whiten=whiten)

    clean = penalized(run)
    for far in (1000.0, float("nan")):
        moved = penalized(run, old_logprobs=far, reference_logprobs=-far, values=far)
        for column in ("token_rewards", "advantages", "returns"):
            if column in clean:
                assert moved[column] == clean[column]
    given = torch.tensor([*itertools.chain(*(mask for mask in MASKS if any(mask)))]) == 0
    assert (clean.ragged("token_rewards")[0][given] == 0).all()


def test_token_rewards_sum_to_the_reward_less_the_penalty_of_sampled_tokens():
    samples = Batch.of(
        reward=[1.0],
        response_mask=[[1, 0, 0, 1]],
        response_logprobs=[[-1.0, 0.0, 0.0, -1.0]],
        reference_logprobs=[[-1.5, -50.0, -50.0, -2.0]],
    )
    made = token_rewards(samples, coefficient=0.5)
    assert made["token_rewards"].to_pylist() == [[-0.25, 0.0, 0.0, 0.5]]
    returns = return_advantages(made, whiten=False)["advantages"].to_pylist()
    assert returns == [[0.25, 0.0, 0.0, 0.5]]
    plain = outcome_rewards(samples.with_columns(response_ids=[[1] * 4]))
    assert plain["token_rewards"].to_pylist() == [[0.0, 0.0, 0.0, 1.0]]
