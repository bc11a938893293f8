"""Evaluation: responses to held-out prompts, scored. The mean of its rewards is the run's `eval/reward/mean`."""

from __future__ import annotations

from typing import Any

from ..dataflow.tracing import graph
from .protocols import Reward, Rollout
from .sampling import Sampling


@graph
def evaluate(prompts: Any, *, rollout: Rollout, reward: Reward, sampling: Sampling = Sampling(), n: int = 1) -> Any:
    """Generate and score; greedy decoding is `sampling=weft.Sampling(temperature=0, ...)`."""
    samples = rollout.generate(prompts, n=n, sampling=sampling)
    return reward.score(samples)
