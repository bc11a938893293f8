"""The run that `recovery.py` kills: GRPO of a tiny random model, as a program of its own.

    python benchmarks/recovery_run.py --folder WORK --root RUNS --schedule asynchronous --steps 100

WORK is a folder that `workloads.prepare` made. Its workers are Weft's own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import psutil
from workloads import reward as share_of_sevens

import weft
from weft.algorithms.grpo import grpo
from weft.workers.generation.vllm_settings import VllmSettings
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig

SAMPLES = 4
"""Responses to a prompt."""
SCORING_S = 0.005
"""Seconds that the reward of a sample takes, so that the reward worker is at work for a part of each step."""


def reward(response: str) -> float:
    time.sleep(SCORING_S)
    return share_of_sevens(response)


class Settings(weft.Config):
    folder: Path
    """Model and prompts."""
    root: Path
    """Where the run directory goes."""
    name: str = "run"
    """Of the run."""
    schedule: Literal["synchronous", "pipelined", "asynchronous"] = "synchronous"
    """When nodes run."""
    backend: Literal["ray", "local"] = "ray"
    """Two ranks of actor and rollout on a Ray cluster, or everything in this process."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What generates."""
    steps: int = 20
    """Updates."""
    prompts: int = 4
    """Prompts in a step."""
    max_tokens: int = 12
    """Of a response."""
    every: int = 2
    """Steps from one checkpoint to the next."""
    keep: int = 2
    """Checkpoints that are kept."""
    seed: int = 0
    """Of sampling and order."""
    resume: str = "none"
    """latest: go on."""
    engine_start: bool = False
    """Start only a rollout worker, print the seconds from the start of the process until it is up, and end."""


def rollout_settings(settings: Settings) -> dict[str, Any]:
    return {
        "model": str(settings.folder / "model"),
        "engine": settings.engine,
        "vllm": VllmSettings(max_num_seqs=16),
    }


def main(settings: Settings) -> None:
    """A run to be killed."""
    if settings.engine_start:
        RolloutWorker(RolloutConfig(**rollout_settings(settings)))
        print(f"up after {time.time() - psutil.Process().create_time():.3f} s", flush=True)
        return
    model = str(settings.folder / "model")
    prompts = weft.Prompts.read(settings.folder / "prompts.jsonl", model)
    actor = weft.group(weft.ActorWorker, name="actor", model=model, learning_rate=1e-4)
    rollout = weft.group(weft.RolloutWorker, name="rollout", **rollout_settings(settings))
    scorer = weft.group(weft.RewardWorker, name="reward", function=reward, tokenizer=model)
    rollout.follows(actor)
    sampling = weft.Sampling(max_tokens=settings.max_tokens)
    graph = grpo(prompts, rollout=rollout, reward=scorer, actor=actor, n=SAMPLES, sampling=sampling)
    steps: dict[str, Any] = {"steps": settings.steps, "prompts_per_step": settings.prompts}
    schedules = {
        "synchronous": weft.Synchronous(**steps),
        "pipelined": weft.Pipelined(**steps),
        "asynchronous": weft.Asynchronous(**steps, max_staleness=1),
    }
    ray = settings.backend == "ray"
    pools = {name: weft.ResourcePool(f"for {name}", cpus=1) for name in ("rollout", "actor")}
    with weft.Driver(
        graph,
        schedule=schedules[settings.schedule],
        placement={name: weft.Place(pool, ranks=2) for name, pool in pools.items()} if ray else None,
        backend=weft.RayBackend() if ray else weft.Local(),
        root=settings.root,
        name=settings.name,
        checkpoint=weft.CheckpointConfig(every=settings.every, keep=settings.keep),
        resume=settings.resume,
        seed=settings.seed,
    ) as driver:
        driver.run()


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
