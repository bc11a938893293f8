"""A toy run under `weft.launch`, slow enough to be ended early. `saved_runs.begun` starts it."""

import signal
import time
from pathlib import Path
from typing import Literal

from saved_runs import SavingActor
from toy import SlowRollout, ToyReward, prompts, toy_grpo

import weft
from weft.dataflow.batch import Batch
from weft.dataflow.metrics import Metrics

SCHEDULES = {
    "synchronous": weft.Synchronous,
    "pipelined": weft.Pipelined,
    "asynchronous": weft.Asynchronous,
}


class SlowReward(ToyReward):
    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        time.sleep(0.05)
        return super().score(samples)


class Settings(weft.Config):
    root: Path
    every: int = 1000
    steps: int = 100_000
    resume: str = "none"
    backend: Literal["local", "ray"] = "local"
    schedule: Literal["synchronous", "pipelined", "asynchronous"] = "synchronous"


def main(settings: Settings) -> None:
    """Train the toy actor slowly."""
    rollout, actor = weft.group(SlowRollout, name="rollout"), weft.group(SavingActor, name="actor")
    reward = weft.group(SlowReward, name="reward")
    rollout.follows(actor)
    with weft.Driver(
        toy_grpo(prompts(10), rollout=rollout, reward=reward, actor=actor),
        schedule=SCHEDULES[settings.schedule](steps=settings.steps, prompts_per_step=3),
        checkpoint=weft.CheckpointConfig(every=settings.every),
        resume=settings.resume,
        backend=weft.RayBackend() if settings.backend == "ray" else weft.Local(),
        name="run",
        root=settings.root,
    ) as driver:
        driver.run()


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup make test` it would be ignored
    raise SystemExit(weft.launch(main))
