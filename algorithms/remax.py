"""ReMax's baseline: the reward of the greedy response to the same prompt."""

from __future__ import annotations

from typing import Any

from ..dataflow.column import BASELINE_REWARD
from ..dataflow.tracing import graph
from .protocols import Rewarder, Rollout
from .sampling import Sampling


@graph
def greedy_baselines(prompts: Any, *, rollout: Rollout, reward: Rewarder, sampling: Sampling = Sampling()) -> Any:
    """The greedy response to each prompt, with its reward as `baseline_reward` (ReMax, arXiv:2310.10505, algorithm 1).

    What is generated from these rows carries it: the estimator `greedy_baseline` takes it off the reward. `grpo` has this node
    where its estimator reads the column.
    """
    greedy = rollout.generate(prompts, n=1, sampling=sampling.greedy)
    return reward.score(greedy, into=str(BASELINE_REWARD))
