"""Every loss of the library, and one rank of a training group that takes a step with each of
them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from ranks import rendezvous
from spmd import one_step, take_over

from weft.algorithms import preference_loss as preference
from weft.algorithms.aggregation import episode_mean, fixed_length, sequence_mean
from weft.algorithms.corrections import (
    DivergenceRejection,
    DriftRejection,
    Rejection,
    TruncatedImportance,
)
from weft.algorithms.covariance import ClipCov, KlCov
from weft.algorithms.distillation import Distillation, Jsd
from weft.algorithms.kl import KlPenalty, StraightThrough, k2, k3
from weft.algorithms.loss import Loss
from weft.algorithms.policy_loss import NegativeLogLikelihood, PolicyLoss
from weft.algorithms.preference_loss import DesirabilityLoss, PreferenceLoss
from weft.algorithms.reward_model import RewardLoss, StepLoss
from weft.algorithms.step_corrections import SecondMoment
from weft.algorithms.surrogates import (
    Cispo,
    Clipped,
    Dppo,
    GeometricRatio,
    PlainPolicyGradient,
    Sapo,
    Unclipped,
    Vespo,
    sequence_product,
    sequence_ratio,
    sequence_token_ratio,
)
from weft.algorithms.values import ValueLoss
from weft.dataflow.batch import Batch
from weft.dataflow.metrics import Metrics
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.critic import CriticConfig, CriticWorker
from weft.workers.training.engine import Head
from weft.workers.worker import Context


@dataclass(frozen=True)
class Case:
    """A loss with the head that it needs."""

    loss: Loss
    head: Head = "logprobs"
    reads_last: bool = False
    """The loss reads the last token of a row even if masked, so added tokens change it."""
    tolerance: float = 1e-6
    """Relative tolerance of loss and gradient; see `test_losses.py`."""


HEADS: tuple[Head, ...] = ("logprobs", "values", "rewards")
per_token = preference.LogRatio(per_token=True)
LOSSES: dict[str, Case] = {
    "token mean": Case(PolicyLoss()),
    "grpo": Case(
        PolicyLoss(aggregation=sequence_mean, kl=KlPenalty(coefficient=0.1), old="old_logprobs")
    ),
    "episode mean": Case(PolicyLoss(aggregation=episode_mean)),
    "dr grpo": Case(PolicyLoss(aggregation=fixed_length(16))),
    "dual clip, k2": Case(
        PolicyLoss(surrogate=Clipped(dual=3.0), kl=KlPenalty(coefficient=0.1, estimator=k2))
    ),
    "entropy": Case(PolicyLoss(entropy_coefficient=0.01)),
    "gspo": Case(
        PolicyLoss(surrogate=Clipped(low=0.1), ratio=sequence_ratio, aggregation=sequence_mean)
    ),
    "rloo": Case(PolicyLoss(ratio=sequence_product, aggregation=sequence_mean), tolerance=3e-6),
    "cispo": Case(PolicyLoss(surrogate=Cispo(high=4.0))),
    "sapo, straight through": Case(
        PolicyLoss(surrogate=Sapo(), kl=KlPenalty(coefficient=0.1, estimator=StraightThrough(k3)))
    ),
    "log-likelihood": Case(PolicyLoss(surrogate=PlainPolicyGradient())),
    "decoupled": Case(PolicyLoss(old="old_logprobs", correction=TruncatedImportance())),
    "icepop": Case(
        PolicyLoss(
            correction=(TruncatedImportance(cap=1.2, level="sequence"), Rejection(keep=(0.8, 2.0)))
        )
    ),
    "distillation": Case(Distillation()),
    "distillation with a reward": Case(
        Distillation(divergence=Jsd(beta=0.3), weight=0.5, policy=PolicyLoss(entropy_coefficient=0.01))
    ),
    "gmpo": Case(
        PolicyLoss(
            ratio=GeometricRatio(low=0.1, high=0.1), surrogate=Unclipped(), aggregation=sequence_mean
        )
    ),
    "gspo by token, weighted kl": Case(
        PolicyLoss(
            ratio=sequence_token_ratio,
            aggregation=sequence_mean,
            kl=KlPenalty(coefficient=0.1, weighted=True),
        )
    ),
    "clip-cov": Case(PolicyLoss(covariance=ClipCov())),
    "kl-cov": Case(PolicyLoss(covariance=KlCov(coefficient=0.3), surrogate=Unclipped())),
    "drift": Case(PolicyLoss(correction=DriftRejection(limit=0.05))),
    "vespo": Case(PolicyLoss(ratio=sequence_product, surrogate=Vespo()), tolerance=3e-6),
    "dppo": Case(PolicyLoss(surrogate=Dppo(low=0.01, high=0.01, penalty=1e-3))),
    "divergence, weights of the step": Case(
        PolicyLoss(
            surrogate=Unclipped(),
            correction=(DivergenceRejection(limit=0.3, over="max"), SecondMoment()),
        )
    ),
    "supervised": Case(NegativeLogLikelihood()),
    "supervised by sequence": Case(NegativeLogLikelihood(aggregation=sequence_mean)),
    "dpo": Case(PreferenceLoss()),
    "wpo": Case(PreferenceLoss(on_policy=True)),
    "length-normalised dpo": Case(PreferenceLoss(beta=2, score=per_token)),
    "cdpo": Case(PreferenceLoss(comparison=preference.Logistic(label_smoothing=0.1))),
    "robust": Case(PreferenceLoss(comparison=preference.RobustLogistic(label_smoothing=0.1))),
    "ipo": Case(PreferenceLoss(beta=1, score=per_token, comparison=preference.Squared(tau=0.1))),
    "apo": Case(PreferenceLoss(comparison=preference.ApoZero())),
    "exo": Case(PreferenceLoss(comparison=preference.Exo(label_smoothing=0.1))),
    "sppo": Case(PreferenceLoss(beta=1, comparison=preference.Sppo())),
    "f-dpo, discopop": Case(
        PreferenceLoss(score=preference.DivergenceRatio(), comparison=preference.DiscoPop()),
        tolerance=3e-6,  # its temperature of 0.05 enlarges rounding errors 20 times
    ),
    "ld-dpo": Case(PreferenceLoss(score=preference.LogRatio(beyond=0.3))),
    "hinge": Case(PreferenceLoss(comparison=preference.Hinge())),
    "simpo": Case(PreferenceLoss(beta=2, score=preference.LogLikelihood(per_token=True), margin=1)),
    "orpo": Case(PreferenceLoss(beta=1, score=preference.LogOdds(), weight=0.1, likelihood=1)),
    "rpo": Case(PreferenceLoss(likelihood=1)),
    "kto": Case(DesirabilityLoss(weights=(1.5, 1.0))),
    "bco": Case(preference.ClassifierLoss(weights=(1.5, 1.0))),
    "value": Case(ValueLoss(), "values"),
    "value, unclipped, by sequence": Case(ValueLoss(clip=None, aggregation=sequence_mean), "values"),
    "reward": Case(RewardLoss(margin="margin", centring=0.01), "rewards", reads_last=True),
    "steps": Case(StepLoss(), "rewards"),
}


def worker(
    model: str, head: Head, context: Context = Context(), **settings: Any
) -> ActorWorker | CriticWorker:
    settings = {"model": model, "learning_rate": 1e-3, "max_grad_norm": None, **settings}
    if head == "logprobs":
        return ActorWorker(ActorConfig(**settings), context)
    return CriticWorker(CriticConfig(**settings, head=head), context)


def step(
    trained: ActorWorker | CriticWorker, rows: Batch, loss: Loss, parts: list[list[int]] | None = None
) -> tuple[dict[str, torch.Tensor], Metrics]:
    """Return (gradient by name, metrics) of one update, and restore the weights."""
    weights = {name: tensor.clone() for name, tensor in trained.engine.named_tensors()}
    gradient, metrics = one_step(trained, rows, loss, parts)
    take_over(trained.engine, weights)
    return gradient, metrics["_metrics"]


def main(folder: Path, rank: int) -> None:
    case: dict[str, Any] = json.loads((folder / "case.json").read_text())
    torch.set_num_threads(1)
    rows = Batch(pa.ipc.open_file(folder / "rows.arrow").get_batch(0))
    found = {}
    for head in HEADS:
        context = Context("trained", rank, case["ranks"], rendezvous(folder, rank, f"rendezvous-{head}"))
        trained = worker(case["model"], head, context, microbatch_tokens=60)
        for name, one in LOSSES.items():
            if one.head == head:
                found[name] = step(trained, rows.take(case["shares"][name][rank]), one.loss)
        trained.close()
    torch.save(found, folder / f"rank{rank}.pt")
