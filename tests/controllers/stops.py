"""A run in one process whose reward worker stops at a `breakpoint()`, for `test_breakpoint.py`."""

import sys
from pathlib import Path

from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_grpo

import weft
from weft.dataflow.batch import Batch
from weft.dataflow.metrics import Metrics


class StoppingReward(ToyReward):
    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        """The overridden method declares the columns."""
        breakpoint()
        return super().score(samples)


rollout, reward, actor = weft.group(ToyRollout), weft.group(StoppingReward), weft.group(ToyActor)
graph = toy_grpo(prompts(4), rollout=rollout, reward=reward, actor=actor)
schedule = weft.Synchronous(steps=1, prompts_per_step=4)
with weft.Driver(graph, schedule=schedule, root=Path(sys.argv[1]), progress=False) as driver:
    print(len(driver.run()))
