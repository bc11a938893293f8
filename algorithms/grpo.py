"""GRPO as a graph. `advantages` and `loss` turn it into Dr. GRPO, DAPO, GSPO, RLOO or ReMax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import (
    BASELINE_REWARD,
    ENTROPY_COEFFICIENT,
    EPISODE_ID,
    EPISODE_ROWS,
    FINISH_REASON,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    RESPONSE_MASK,
)
from ..dataflow.errors import UserError
from ..dataflow.metrics import Mean, Metric, Metrics, Sum
from ..dataflow.operation import GROUPS, Quorum, Shape, node
from ..dataflow.tracing import graph
from .advantages import Estimator, group_advantages, group_normalized, have_equal_rewards
from .covariance import with_covariance
from .loss import Loss
from .policy_loss import PolicyLoss, needs_entropies, needs_forward_pass, old_logprobs
from .protocols import Policy, Rewarder, Rollout, Scorer, scored
from .rewards import truncated_rows
from .sampling import Sampling
from .step_corrections import with_step_weights

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@graph
def greedy_baselines(
    prompts: Any, *, rollout: Rollout, reward: Rewarder, sampling: Sampling = Sampling()
) -> Any:
    """Sample greedy responses, and store their reward as `baseline_reward` (ReMax,
    arXiv:2310.10505). Responses generated from these rows inherit the column, which the estimator
    `greedy_baseline` subtracts."""
    greedy = rollout.generate(prompts, n=1, sampling=sampling.greedy)
    return reward.score(greedy, into=str(BASELINE_REWARD))


@graph
def grpo(
    prompts: Any,
    *,
    rollout: Any,
    reward: Rewarder | None = None,
    actor: Policy,
    harness: Any = None,
    env: Any = None,
    reference: Scorer | None = None,
    n: int = 8,
    sampling: Sampling = Sampling(),
    loss: Loss = PolicyLoss(),
    advantages: Estimator = group_normalized,
    epochs: int = 1,
    minibatches: int = 1,
    entropies: bool = False,
    entropy: Any = None,
) -> Any:
    """Group-relative policy optimization (arXiv:2402.03300), with n responses per prompt.

    The actor makes `epochs` passes of `minibatches` optimizer steps each. If the loss needs old
    log-probabilities, the actor computes them before the update. If the estimator reads
    `baseline_reward` (ReMax), the graph also samples greedy responses.

    With a `harness` or with environments (`env`), the responses are the turns of agents, with their
    reward. Without them, `reward` scores the responses.

    `entropies` adds the entropy of each token, at the cost of a forward pass if the loss needs no
    old log-probabilities. `entropy`, an `AdaptiveEntropyWorker`, sets the coefficient of the entropy
    bonus for `PolicyLoss(entropy_coefficient="entropy_coefficient")`.
    """
    if reward is not None and str(BASELINE_REWARD) in getattr(advantages, "reads", ()):
        prompts = greedy_baselines(prompts, rollout=rollout, reward=reward, sampling=sampling)
    ways: dict[str, Any] = {"reward": reward, "harness": harness, "env": env}
    samples = scored(prompts, rollout=rollout, **ways, n=n, sampling=sampling)
    if reference:
        samples = reference.logprobs(samples, into=str(REFERENCE_LOGPROBS))
    entropies = entropies or entropy is not None or needs_entropies(loss)
    if entropies or needs_forward_pass(loss, epochs=epochs, minibatches=minibatches):
        samples = old_logprobs(samples, actor=actor, entropies=entropies)
    if entropy is not None:
        if str(ENTROPY_COEFFICIENT) not in loss.reads:
            raise UserError(
                f"grpo(entropy=...): the loss ignores the coefficient; set PolicyLoss(entropy_coefficient={str(ENTROPY_COEFFICIENT)!r})"
            )
        # Use the current coefficient before these rows change it.
        samples = entropy.update(entropy.coefficients(samples))
    samples = group_advantages(samples, estimator=advantages)
    samples = with_step_weights(with_covariance(samples, loss=loss), loss=loss)
    return actor.update(samples, loss=loss, epochs=epochs, minibatches=minibatches)


# Filters: nodes that select rows.


@node(shape=Shape.FILTER, reads=lambda by: (by,), may_read=(EPISODE_ID, EPISODE_ROWS), takes=Quorum)
def first_of_group(
    samples: Batch, n: int, *, by: str = "reward", deadline_s: float | None = None
) -> Batch:
    """Keep the first `n` rows of each group to get the column `by`, and cancel the others.

    Generate more samples than needed, so that no group waits for its slowest ones:
    `rollout.generate(prompts, n=10)`, then `first_of_group(samples, 8)`. Weft skips work on
    canceled rows and discards late results.

    If some rows of an episode are not among the first `n`, the others are dropped too.

    Args:
        n: rows to keep per group; smaller groups keep all.
        deadline_s: seconds after a group's first finished row until the group continues with fewer
            than `n` rows; None waits for `n` rows.

    >>> first_of_group(Batch.of(sample_id=[1, 2], reward=[0.0, 1.0]), 2).numpy("sample_id").tolist()
    [1, 2]
    """
    # The buffer applies the limit, so keep every row that arrives here, except parts of episodes.
    if EPISODE_ROWS not in samples:
        return samples
    index = samples.groups(EPISODE_ID)[1]
    return samples.take(np.flatnonzero(np.bincount(index)[index] == samples.numpy(EPISODE_ROWS)))


@node(
    reads=(FINISH_REASON, RESPONSE_IDS),
    may_read=(RESPONSE_MASK, EPISODE_ID),
    writes=(RESPONSE_MASK,),
)
def mask_truncated(samples: Batch) -> tuple[Batch, Metrics]:
    """Mask responses that reached the length limit (overlong filtering, DAPO, arXiv:2503.14476,
    §3.4): a reward of 0 for them says nothing about their content. If one row of an episode is
    truncated, all its rows are masked.

    Before `group_advantages`, the masked responses do not vote in their group either; after it, they
    do. The metric `truncated_rows` counts the masked rows.

    >>> samples = Batch.of(response_ids=[[5, 6], [7]], finish_reason=["length", "stop"])
    >>> mask_truncated(samples)[0]["response_mask"].to_pylist()
    [[0, 0], [1]]
    """
    _, cu_seqlens = samples.ragged_numpy(RESPONSE_IDS)
    truncated = truncated_rows(samples)
    mask = np.ones(int(cu_seqlens[-1]), np.uint8)
    if RESPONSE_MASK in samples:
        mask = samples.ragged_numpy(RESPONSE_MASK)[0].copy()
    mask[np.repeat(truncated, np.diff(cu_seqlens))] = 0
    counted = {"truncated_rows": Sum(float(truncated.sum()))}
    return samples.with_columns(response_mask=(mask, cu_seqlens)), counted


@node(shape=Shape.FILTER, reads=lambda by: (by,), may_read=(EPISODE_ID, RESPONSE_MASK), takes=GROUPS)
def drop_zero_variance(samples: Batch, *, by: str = "reward") -> tuple[Batch, Metrics]:
    """Drop groups of equal rewards (dynamic sampling, DAPO, arXiv:2503.14476, eq. 11), including
    groups of one episode, but keep groups with a NaN reward. Episodes without a trained token do
    not count. The metric `zero_variance_groups` counts the dropped groups.

    In training, other prompts replace the dropped groups. If all groups have equal rewards,
    sampling never ends.

    Args:
        by: the column to compare. The default `reward` is the sum of all reward functions, so a
            shaping term such as a length penalty hides groups of equal outcomes. Name the outcome
            then: `by="reward/correct"` for a function `correct`.

    >>> samples = Batch.of(group_id=[7, 8, 7, 8], reward=[1.0, 1.0, 0.0, 1.0])
    >>> kept, metrics = drop_zero_variance(samples)
    >>> kept["group_id"].to_pylist(), metrics["zero_variance_groups"].value
    ([7, 7], 1.0)
    """
    equal, (_, index) = have_equal_rewards(samples, by), samples.groups()
    return samples.take(np.flatnonzero(~equal[index])), {"zero_variance_groups": Sum(float(equal.sum()))}


def length_bias(trained_lengths: ArrayLike, finished_lengths: ArrayLike) -> dict[str, Metric]:
    """Measure whether trained responses are shorter than sampled ones.

    Short responses finish first. A run that cancels slow responses, or drops stale ones, therefore
    trains on too many short ones, and the policy learns to be short.

    `length_ratio` is the mean trained length divided by the mean finished length; 1 means no bias.
    Without responses, metrics have weight 0 and value NaN. Raises a ValueError for a negative
    length.

    Args:
        trained_lengths: [B] tokens of each response that was trained on in a step.
        finished_lengths: [N] tokens of each response that finished in the step.

    >>> {name: metric.value for name, metric in length_bias([2, 4], [2, 4, 6, 12]).items()}
    {'length_ratio': 0.5, 'mean_trained_length': 3.0, 'mean_finished_length': 6.0}
    """
    trained, finished = (
        np.asarray(lengths, dtype=np.float64).ravel() for lengths in (trained_lengths, finished_lengths)
    )
    if min(trained.min(initial=0), finished.min(initial=0)) < 0:
        raise ValueError("a response has a negative length")
    total, number = float(trained.sum()), len(trained)
    # Expected tokens of `number` responses drawn uniformly from the finished ones.
    expected = number * float(finished.mean()) if len(finished) else 0.0
    return {
        "length_ratio": Mean(total if expected else 0.0, expected),
        "mean_trained_length": Mean(total, number),
        "mean_finished_length": Mean(float(finished.sum()), len(finished)),
    }
