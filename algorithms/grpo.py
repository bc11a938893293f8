"""GRPO and its family, as one graph: Dr. GRPO, DAPO, GSPO, RLOO and ReMax are other values of `advantages` and `loss`."""

from __future__ import annotations

from typing import Any

from ..dataflow.column import BASELINE_REWARD, REFERENCE_LOGPROBS
from ..dataflow.tracing import graph
from .advantages import Estimator, group_advantages, group_normalized
from .loss import Loss
from .old_policy import needs_old_logprobs, old_logprobs
from .policy_loss import PolicyLoss
from .protocols import Policy, Rewarder, Rollout, Scorer
from .remax import greedy_baselines
from .sampling import Sampling


@graph
def grpo(
    prompts: Any,
    *,
    rollout: Rollout,
    reward: Rewarder,
    actor: Policy,
    reference: Scorer | None = None,
    n: int = 8,
    sampling: Sampling = Sampling(),
    loss: Loss = PolicyLoss(),
    advantages: Estimator = group_normalized,
    epochs: int = 1,
    minibatches: int = 1,
    entropies: bool = False,
) -> Any:
    """Group-relative policy optimisation (arXiv:2402.03300): n responses to a prompt are each other's baseline.

    The actor makes `epochs` passes of `minibatches` steps each. Its own log-probabilities from before the update are computed where
    the loss needs them, and greedy responses are sampled where the estimator compares with their reward (ReMax). `entropies` adds the
    entropy of each token to the samples, from the pass that computes those log-probabilities (it is made for this alone if need be).
    """
    if str(BASELINE_REWARD) in getattr(advantages, "reads", ()):
        prompts = greedy_baselines(prompts, rollout=rollout, reward=reward, sampling=sampling)
    samples = rollout.generate(prompts, n=n, sampling=sampling)
    samples = reward.score(samples)
    if reference:
        samples = reference.logprobs(samples, into=str(REFERENCE_LOGPROBS))
    if entropies or needs_old_logprobs(loss, epochs=epochs, minibatches=minibatches):
        samples = old_logprobs(samples, actor=actor, entropies=entropies)
    samples = group_advantages(samples, estimator=advantages)
    return actor.update(samples, loss=loss, epochs=epochs, minibatches=minibatches)
