"""Evaluation: responses to held-out prompts, scored. The mean of its rewards is the run's `eval/reward/mean`."""

from __future__ import annotations

import math
from typing import Any

from ..dataflow.tracing import graph
from .protocols import Rewarder, Rollout
from .sampling import Sampling


@graph
def evaluate(prompts: Any, *, rollout: Rollout, reward: Rewarder, sampling: Sampling = Sampling(), n: int = 1) -> Any:
    """Generate and score; greedy decoding is `sampling=weft.Sampling(temperature=0, ...)`."""
    samples = rollout.generate(prompts, n=n, sampling=sampling)
    return reward.score(samples)


Z = 1.96
"""Standard deviations of a normal distribution within which 95 % of it lie."""


def interval(mean: float, std: float, number: float) -> tuple[float, float] | None:
    """The 95 % interval of a mean over samples that are independent, such as one response to each of many prompts.

    Of rewards that are all 0 or 1 it is Wilson's score interval (JASA 22, 1927), which does not shrink to nothing where all are equal;
    of others that of the normal distribution. Rewards from 0 to 1 are all 0 or 1 just when their variance is mean (1 - mean).

    Args:
        mean: of the rewards.
        std: their standard deviation, not an estimate for others.
        number: of them.

    Returns:
        Lower and upper end; None for fewer than two samples.

    >>> [round(end, 3) for end in interval(0.5, 0.5, 100)], [round(end, 3) for end in interval(0.0, 0.0, 100)]
    ([0.404, 0.596], [0.0, 0.037])
    >>> [round(end, 3) for end in interval(3.0, 1.0, 101)]
    [2.804, 3.196]
    """
    if number < 2:
        return None
    if 0 <= mean <= 1 and math.isclose(std**2, mean * (1 - mean), abs_tol=1e-9):
        middle = (mean + Z**2 / (2 * number)) / (1 + Z**2 / number)
        half = Z / (1 + Z**2 / number) * math.sqrt(mean * (1 - mean) / number + Z**2 / (4 * number**2))
        return max(0.0, middle - half), min(1.0, middle + half)
    half = Z * std / math.sqrt(number - 1)
    return mean - half, mean + half
