"""Evaluation on held-out prompts, with confidence intervals over prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import EPISODE_ID, FINAL_ANSWER, RESPONSE_MASK, REWARD
from ..dataflow.errors import UserError
from ..dataflow.metrics import Estimate, Metrics, Sum
from ..dataflow.operation import Shape, node
from ..dataflow.tracing import graph
from .episodes import Episodes
from .protocols import Rewarder, scored
from .sampling import Sampling


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the unbiased estimate 1 - C(n - c, k) / C(n, k) of the probability that at least one
    of k samples solves a prompt, if c of n samples solve it (arXiv:2107.03374, eq. 1). Raises a
    ValueError if k is not between 1 and n, or c not between 0 and n.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 1, 4), pass_at_k(4, 0, 4)
    (0.25, 0.5, 1.0, 0.0)
    """
    if not 1 <= k <= num_samples or not 0 <= num_solved <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_samples} samples, {num_solved} of which solve the prompt, is not defined"
        )
    if num_samples - num_solved < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def majority_at_k(answers: Sequence[str | None], solved: Sequence[bool], k: int) -> float:
    """Return the probability that the most frequent answer of k samples is correct (self-consistency,
    arXiv:2203.11171, §2), estimated without bias from disjoint blocks of k samples.

    All correct samples vote for the same answer. Samples without an answer do not vote. Of several
    most frequent answers, each is chosen with equal probability. A block without votes counts as
    wrong. Raises a ValueError if k is not between 1 and the number of samples.

    >>> majority_at_k(["7", "5", "5", None], [True, False, False, False], 4)
    0.0
    >>> majority_at_k(["7", "5", "7", "8"], [True, False, True, False], 2)
    0.5
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} of {len(answers)} samples is not defined")
    scores: list[float] = []
    for first in range(0, len(answers) - k + 1, k):
        block = zip(answers[first : first + k], solved[first : first + k], strict=True)
        # `None` is the correct answer, which samples may write in different ways.
        votes = Counter(
            None if right else answer for answer, right in block if right or answer is not None
        )
        most = max(votes.values(), default=0)
        winners = [answer for answer, number in votes.items() if number == most]
        scores.append((None in winners) / len(winners) if winners else 0.0)
    return math.fsum(scores) / len(scores)


@node(
    shape=Shape.GROUP,
    reads=lambda reward, verdict: (reward, verdict),
    may_read=(EPISODE_ID, RESPONSE_MASK, FINAL_ANSWER),
)
def score_prompts(
    samples: Batch,
    *,
    n: int,
    k: tuple[int, ...],
    solved: float = 1.0,
    reward: str = str(REWARD),
    verdict: str = str(REWARD),
) -> Metrics:
    """Compute avg@n, pass@k and, if rows have a final answer, maj@k over prompts; the samples of one
    prompt are not independent. An episode is one sample, however many rows it has. Episodes and
    prompts without a trained token do not count.

    Args:
        samples: whole groups, with the columns `reward` and `verdict`.
        n: number of samples requested per prompt; some may have been dropped.
        k: values of k for pass@k and maj@k, which exclude prompts with fewer than k samples.
        solved: lowest verdict of a correct sample.
        verdict: column that marks correct samples.

    >>> samples = Batch.of(group_id=[3, 3, 7, 7], reward=[1.0, 0.0, 0.0, 0.0])
    >>> {name: metric.value for name, metric in score_prompts(samples, n=2, k=(1, 2)).items()}
    {'avg@2': 0.25, 'pass@1': 0.25, 'pass@2': 0.5, 'prompts': 2.0}
    """
    episodes = Episodes.of(samples)
    rewards, (groups, index) = episodes.values(reward).astype(np.float64), episodes.groups()
    numbers = np.bincount(index, minlength=len(groups))
    means = np.bincount(index, weights=rewards, minlength=len(groups)) / numbers
    is_solved = episodes.values(verdict).astype(np.float64) >= solved
    solving = np.bincount(index, weights=is_solved, minlength=len(groups)).astype(np.int64)
    metrics: Metrics = {f"avg@{n}": Estimate.of(means.tolist())}
    counts = list(zip(numbers.tolist(), solving.tolist(), strict=True))
    for one in k:
        solves = [pass_at_k(*count, one) for count in counts if count[0] >= one]
        metrics[f"pass@{one}"] = Estimate.of(solves)
    if FINAL_ANSWER in samples:
        answers = samples[FINAL_ANSWER].to_pylist()
        answers = [answers[row] for row in episodes.first]
        members = [np.flatnonzero(index == group) for group in range(len(groups))]
        for one in k:
            if one > 1:  # maj@1 is pass@1
                scores = [
                    majority_at_k([answers[i] for i in own], is_solved[own].tolist(), one)
                    for own in members
                    if len(own) >= one
                ]
                metrics[f"maj@{one}"] = Estimate.of(scores)
    return {**metrics, "prompts": Sum(float(len(groups)))}


@graph
def evaluate(
    prompts: Any,
    *,
    rollout: Any,
    reward: Rewarder | None = None,
    harness: Any = None,
    env: Any = None,
    sampling: Sampling = Sampling(),
    n: int = 1,
    k: Sequence[int] = (),
    solved: float | None = None,
    verdict: str | None = None,
) -> Any:
    """Score n responses to each prompt, and measure avg@n, pass@k and maj@k with 95 % confidence
    intervals.

    avg@n is the mean reward. For pass@k, the grader (such as `Math`) among the reward functions
    decides whether a response is correct. Without a grader, a response is correct if its reward is
    at least `solved`, and pass@k is measured only if `solved` or `k` is given or `n` is above 1.
    maj@k, the accuracy of the most frequent of k final answers, needs a single grader, which defines
    `final_answer`.

    For greedy decoding, pass `sampling=weft.Sampling(temperature=0, ...)`.

    Args:
        harness: agents to evaluate instead of single responses. Its result is the reward.
        env: environments to play in instead, a group of `EnvWorker`.
        k: values of k for pass@k and maj@k, from 1 to n (otherwise a UserError); by default 1 and
            n.
        solved: lowest verdict of a correct response; by default 1.
        verdict: name of the reward function that marks correct responses; by default the only
            grader.
    """
    if wrong := [one for one in k if not 1 <= one <= n]:
        raise UserError(
            f"evaluate(n={n}, k={tuple(k)}): pass@{wrong[0]} needs n of at least {wrong[0]}, and k of at least 1"
        )
    ways: dict[str, Any] = {"reward": reward, "harness": harness, "env": env}
    samples = scored(prompts, rollout=rollout, **ways, n=n, sampling=sampling)
    find = getattr(getattr(reward, "config", None), "verdict", None)
    if verdict is not None:
        found = f"{REWARD}/{verdict}"
    else:
        found = find(str(REWARD)) if find is not None else None
    # Correctness is undefined for a single sample without a grader or threshold.
    if not (k or n > 1 or found or solved is not None):
        return score_prompts(samples, n=n, k=())
    which = {} if found is None else {"verdict": found}
    ks = tuple(dict.fromkeys(k or (1, n)))
    votes = getattr(getattr(reward, "config", None), "voting", None)
    if votes is not None and verdict is None and max(ks) > 1:
        samples = cast(Any, reward).final_answers(samples)
    return score_prompts(samples, n=n, k=ks, solved=1.0 if solved is None else solved, **which)


Z = 1.959964
"""Half-width of the central 95 % of a normal distribution, in standard deviations."""


def interval(mean: float, std: float, number: float) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of a mean over independent values, such as prompts; None
    for fewer than two.

    If all values are 0 or 1, this is Wilson's score interval (JASA 22, 1927), which stays wide even
    if all values are equal; otherwise it is Student's t interval. Values in [0, 1] are all 0 or 1
    exactly if their variance is mean (1 - mean).

    With several samples per prompt, pass the means of the prompts: an interval over all samples
    would be too narrow (clustered errors, arXiv:2411.00640). `std` is the population standard
    deviation.

    >>> [round(end, 3) for end in interval(0.5, 0.5, 100)], [round(end, 3) for end in interval(0.0, 0.0, 100)]
    ([0.404, 0.596], [0.0, 0.037])
    >>> [round(end, 3) for end in interval(3.0, 1.0, 5)]
    [1.612, 4.388]
    """
    if number < 2:
        return None
    if 0 <= mean <= 1 and math.isclose(std**2, mean * (1 - mean), abs_tol=1e-9):
        middle = (mean + Z**2 / (2 * number)) / (1 + Z**2 / number)
        half = Z / (1 + Z**2 / number) * math.sqrt(mean * (1 - mean) / number + Z**2 / (4 * number**2))
        return max(0.0, middle - half), min(1.0, middle + half)
    # The standard error: population deviation / sqrt(n - 1) = sample deviation / sqrt(n).
    half = student_t(number - 1) * std / math.sqrt(number - 1)
    return mean - half, mean + half


def student_t(freedom: float) -> float:
    """Return the half-width of the central 95 % of Student's t distribution, in standard errors.

    Exact for 1 and 2 degrees of freedom. From 3 on, an expansion around the normal distribution
    (Abramowitz and Stegun, 26.7.5) has an error below 0.2 %.

    >>> [round(student_t(freedom), 3) for freedom in (1, 2, 4, 30, 1e9)]
    [12.706, 4.303, 2.776, 2.042, 1.96]
    """
    if freedom < 2:
        return math.tan(math.pi * 0.475)
    if freedom < 3:
        return 0.95 / math.sqrt(2 * 0.975 * 0.025)
    z, v = Z, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )
