"""GRPO and its family, as one graph: Dr. GRPO, DAPO, GSPO and RLOO are other values of `advantages` and `loss`."""

from __future__ import annotations

from typing import Any

from ..dataflow.column import REFERENCE_LOGPROBS
from ..dataflow.graph import graph
from .advantages import Estimator, group_advantages, group_normalized
from .loss import Loss
from .policy_loss import PolicyLoss
from .roles import Reward, Rollout, Scorer, Trainable


@graph
def grpo(
    prompts: Any,
    *,
    rollout: Rollout,
    reward: Reward,
    actor: Trainable,
    reference: Scorer | None = None,
    n: int = 8,
    sampling: Any = None,
    loss: Loss = PolicyLoss(),
    advantages: Estimator = group_normalized,
) -> Any:
    """Group-relative policy optimisation (arXiv:2402.03300): n responses to a prompt are each other's baseline."""
    samples = rollout.generate(prompts, n=n, sampling=sampling)
    samples = reward.score(samples)
    if reference:
        samples = reference.logprobs(samples, into=str(REFERENCE_LOGPROBS))
    samples = group_advantages(samples, estimator=advantages)
    return actor.update(samples, loss=loss)
