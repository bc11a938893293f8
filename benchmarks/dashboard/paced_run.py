"""A run of workers that only wait and count, in this process. It prints the end of each step.

python benchmarks/dashboard/paced_run.py FOLDER --steps 30 --step-s 0.7
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "controllers"))

from toy import ToyActor, ToyConfig, ToyLoss, ToyReward, ToyRollout, prompts, toy_grpo  # pyright: ignore[reportMissingImports]

import weft
from weft.dataflow.batch import Batch
from weft.dataflow.metrics import Metrics


class PacedConfig(ToyConfig):
    step_s: float = 0.0
    """[s] Duration of an update."""


class PacedActor(ToyActor):
    Config = PacedConfig

    def update(self, samples: Batch, *, loss: ToyLoss = ToyLoss()) -> Metrics:
        time.sleep(self.config.step_s)
        return super().update(samples, loss=loss)


def paced(folder: Path, steps: int, step_s: float, *, tell: bool = True) -> weft.Driver:
    """Return the run, not started."""

    def over(metrics: Mapping[str, float]) -> bool:
        if tell:
            print(json.dumps([int(metrics["step"]), time.time()]), flush=True)
        return False

    rollout, reward, actor = (
        weft.group(ToyRollout),
        weft.group(ToyReward),
        weft.group(PacedActor, step_s=step_s),
    )
    rollout.follows(actor)
    graph = toy_grpo(prompts(64), rollout=rollout, reward=reward, actor=actor)
    schedule = weft.Synchronous(steps=steps, prompts_per_step=16)
    return weft.Driver(
        graph, schedule=schedule, root=folder, name="paced", progress="none", stop_on=(), stop=over
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--step-s", type=float, default=0.7)
    given = parser.parse_args()
    with paced(given.folder, given.steps, given.step_s) as driver:
        print("begun", flush=True)
        driver.run()
