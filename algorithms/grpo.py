"""GRPO as a graph. `advantages` and `loss` turn it into Dr. GRPO, DAPO, GSPO, RLOO or ReMax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import BASELINE_REWARD, REFERENCE_LOGPROBS
from ..dataflow.metrics import Mean, Metric, Metrics, Sum
from ..dataflow.operation import GROUPS, Quorum, Shape, node
from ..dataflow.tracing import graph
from .advantages import Estimator, group_advantages, group_normalized, have_equal_rewards
from .loss import Loss
from .policy_loss import PolicyLoss, needs_old_logprobs, old_logprobs
from .protocols import Policy, Rewarder, Rollout, Scorer
from .sampling import Sampling

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@graph
def greedy_baselines(
    prompts: Any, *, rollout: Rollout, reward: Rewarder, sampling: Sampling = Sampling()
) -> Any:
    """Sample greedy responses, and store their reward as `baseline_reward` (ReMax,
    arXiv:2310.10505). Responses generated from these rows inherit this column, and the estimator
    `greedy_baseline` subtracts it."""
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
    """Group-relative policy optimization (arXiv:2402.03300), with n responses per prompt.

    The actor makes `epochs` passes of `minibatches` steps each. If the loss needs old
    log-probabilities, the actor computes them before the update. If the estimator compares with the
    reward of greedy responses (ReMax), the graph samples these as well.

    `entropies` adds the entropy of each token to the samples. The forward pass that computes the
    log-probabilities also computes the entropies. If only entropies are needed, it runs for them
    alone.
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


# Filters: nodes that select rows.


@node(shape=Shape.FILTER, reads=lambda by: (by,), takes=Quorum)
def first_of_group(
    samples: Batch, n: int, *, by: str = "reward", deadline_s: float | None = None
) -> Batch:
    """Keep the `n` rows of each group that get the column `by` first, and cancel the others.

    Generate more samples than needed, so that no group waits for its slowest ones:
    `rollout.generate(prompts, n=10)`, then `first_of_group(samples, 8)`. Work on a canceled row is
    skipped if it has not begun; a late result is discarded.

    Args:
        n: number of rows to keep of each group, or all of them if the group has fewer.
        deadline_s: seconds after a group's first finished row at which the group continues with the
            rows that it has; None waits for `n` rows.

    >>> first_of_group(Batch.of(sample_id=[1, 2], reward=[0.0, 1.0]), 2).numpy("sample_id").tolist()
    [1, 2]
    """
    # The buffer applies this limit when it claims rows, so keep every row that arrives here.
    return samples


@node(shape=Shape.FILTER, reads=lambda by: (by,), takes=GROUPS)
def drop_zero_variance(samples: Batch, *, by: str = "reward") -> tuple[Batch, Metrics]:
    """Drop groups of equal rewards (dynamic sampling, DAPO, arXiv:2503.14476, eq. 11), including
    groups of one row; groups with a NaN reward are kept. The metric `zero_variance_groups` counts
    the dropped groups.

    In training, other prompts replace the dropped groups, so steps keep their size. If all groups
    have equal rewards, sampling never ends.

    >>> samples = Batch.of(group_id=[7, 8, 7, 8], reward=[1.0, 1.0, 0.0, 1.0])
    >>> kept, metrics = drop_zero_variance(samples)
    >>> kept["group_id"].to_pylist(), metrics["zero_variance_groups"].value
    ([7, 7], 1.0)
    """
    equal, (_, index) = have_equal_rewards(samples, by), samples.groups()
    return samples.take(np.flatnonzero(~equal[index])), {"zero_variance_groups": Sum(float(equal.sum()))}


def length_bias(trained_lengths: ArrayLike, finished_lengths: ArrayLike) -> dict[str, Metric]:
    """Measure whether trained responses are shorter than sampled ones.

    Short responses finish first. So a run that cancels the slowest responses, or drops stale ones,
    trains on short responses more often than it samples them. The policy then learns to be short
    for no other reason.

    `length_ratio` is the number of trained tokens divided by the number expected if as many
    responses were drawn uniformly from the finished ones. 1 means no bias. The metric can be merged
    over windows and ranks. For an empty window, metrics have weight 0 and value NaN. Raises a
    ValueError if a length is negative.

    Args:
        trained_lengths: [B] number of tokens of each response that was trained on within a window,
            such as a step.
        finished_lengths: [N] number of tokens of each response that finished (or was issued) within
            the window, including the trained ones.

    >>> {name: metric.value for name, metric in length_bias([2, 4], [2, 4, 6, 12]).items()}
    {'length_ratio': 0.5, 'mean_trained_length': 3.0, 'mean_finished_length': 6.0}
    """
    trained, finished = (
        np.asarray(lengths, dtype=np.float64).ravel() for lengths in (trained_lengths, finished_lengths)
    )
    if min(trained.min(initial=0), finished.min(initial=0)) < 0:
        raise ValueError("a response has a negative length")
    total, number = float(trained.sum()), len(trained)
    # Expected number of tokens if as many responses were drawn uniformly from the finished ones.
    expected = number * float(finished.mean()) if len(finished) else 0.0
    return {
        "length_ratio": Mean(total if expected else 0.0, expected),
        "mean_trained_length": Mean(total, number),
        "mean_finished_length": Mean(float(finished.sum()), len(finished)),
    }
