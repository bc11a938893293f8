"""GRPO and its family, as one graph: Dr. GRPO, DAPO, GSPO, RLOO and ReMax are other values of `advantages` and `loss`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import BASELINE_REWARD, REFERENCE_LOGPROBS
from ..dataflow.metrics import Metrics, Sum
from ..dataflow.operation import GROUPS, Quorum, Shape, node
from ..dataflow.tracing import graph
from .advantages import Estimator, group_advantages, group_normalized, have_equal_rewards
from .loss import Loss
from .policy_loss import PolicyLoss, needs_old_logprobs, old_logprobs
from .protocols import Policy, Rewarder, Rollout, Scorer
from .sampling import Sampling

# Remax
#
# ReMax's baseline: the reward of the greedy response to the same prompt.


@graph
def greedy_baselines(
    prompts: Any, *, rollout: Rollout, reward: Rewarder, sampling: Sampling = Sampling()
) -> Any:
    """The greedy response to each prompt, with its reward as `baseline_reward` (ReMax, arXiv:2310.10505, algorithm 1).

    What is generated from these rows carries it: the estimator `greedy_baseline` takes it off the reward. `grpo` has this node
    where its estimator reads the column.
    """
    greedy = rollout.generate(prompts, n=1, sampling=sampling.greedy)
    return reward.score(greedy, into=str(BASELINE_REWARD))


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


# Filters
#
# Filters: nodes that decide which rows go on.


@node(shape=Shape.FILTER, reads=lambda by: (by,), takes=Quorum)
def first_of_group(
    samples: Batch, n: int, *, by: str = "reward", deadline_s: float | None = None
) -> Batch:
    """The first `n` rows of each group that have the column `by`; the others are cancelled and counted as over-issued.

    Generate more samples than are needed, and no group waits for its slowest: `rollout.generate(prompts, n=10)`, then
    `first_of_group(samples, 8)`. Work on a cancelled row that has not begun is left undone, a late result is let go.

    Args:
        n: rows of a group that go on; fewer when the group has fewer.
        by: the column that makes a row count as finished.
        deadline_s: seconds after a group's first finished row when those that are there go on without the others; None
            waits for `n`.

    >>> first_of_group(Batch.of(sample_id=[1, 2], reward=[0.0, 1.0]), 2).numpy("sample_id").tolist()
    [1, 2]
    """
    return samples


@node(shape=Shape.FILTER, reads=lambda by: (by,), takes=GROUPS)
def drop_zero_variance(samples: Batch, *, by: str = "reward") -> tuple[Batch, Metrics]:
    """Drops groups whose rewards are all equal: relative to each other their rows have an advantage of 0, and no gradient
    (dynamic sampling, DAPO, arXiv:2503.14476, eq. 11).

    In training other prompts are issued in their place, so that a step keeps its size; where all groups are alike it goes on
    sampling and does not end.

    Args:
        samples: whole groups.
        by: the column that is compared, exactly.

    Returns:
        The other groups, and `zero_variance_groups`: how many were dropped; groups of one row are among them. A group with a
        reward that is not a number is kept.

    >>> samples = Batch.of(group_id=[7, 8, 7, 8], reward=[1.0, 1.0, 0.0, 1.0])
    >>> kept, metrics = drop_zero_variance(samples)
    >>> kept["group_id"].to_pylist(), metrics["zero_variance_groups"].value
    ([7, 7], 1.0)
    """
    equal, (_, index) = have_equal_rewards(samples, by), samples.groups()
    return samples.take(np.flatnonzero(~equal[index])), {"zero_variance_groups": Sum(float(equal.sum()))}
