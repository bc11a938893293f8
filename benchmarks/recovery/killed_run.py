"""The run whose ranks `recovery.py` kills: GRPO of a tiny random model under Ray.

    python benchmarks/recovery/killed_run.py --folder WORK --root RUNS --steps 100

WORK is a folder made by `workloads.prepare`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Literal

import psutil

sys.path.append(str(Path(__file__).resolve().parents[1]))
from workloads import reward as share_of_sevens

import weft
from weft.algorithms.grpo import grpo
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig

SAMPLES = 4
"""Responses per prompt."""
SCORING_S = 0.005
"""[s] Reward time per sample, so that the reward worker is busy for a part of each step."""


def reward(response: str) -> float:
    time.sleep(SCORING_S)
    return share_of_sevens(response)


class Settings(weft.Config):
    folder: Path
    """Folder with model and prompts."""
    root: Path
    """Folder for the run directory."""
    name: str = "run"
    engine: Literal["transformers", "vllm"] = "transformers"
    """Engine for generation."""
    steps: int = 20
    prompts: int = 4
    """Prompts per step."""
    max_tokens: int = 12
    """[tokens] Longest response."""
    every: int = 2
    """Steps between checkpoints."""
    engine_start: bool = False
    """Start only a rollout worker, print the seconds until it is up, and exit."""


def main(settings: Settings) -> None:
    """Run until killed."""
    model = str(settings.folder / "model")
    generating: dict[str, Any] = {"model": model, "engine": settings.engine, "max_num_seqs": 16}
    if settings.engine_start:
        RolloutWorker(RolloutConfig(**generating))
        print(f"up after {time.time() - psutil.Process().create_time():.3f} s", flush=True)
        return
    actor = weft.group(weft.ActorWorker, name="actor", model=model, learning_rate=1e-4)
    rollout = weft.group(weft.RolloutWorker, name="rollout", **generating)
    scorer = weft.group(weft.RewardWorker, name="reward", function=reward, tokenizer=model)
    rollout.follows(actor)
    graph = grpo(
        weft.Prompts.read(settings.folder / "prompts.jsonl", model),
        rollout=rollout,
        reward=scorer,
        actor=actor,
        n=SAMPLES,
        sampling=weft.Sampling(max_tokens=settings.max_tokens),
    )
    pools = {name: weft.ResourcePool(f"for {name}", cpus=1) for name in ("rollout", "actor")}
    with weft.Driver(
        graph,
        schedule=weft.Synchronous(steps=settings.steps, prompts_per_step=settings.prompts),
        placement={name: weft.Place(pool, ranks=2) for name, pool in pools.items()},
        backend=weft.RayBackend(),
        root=settings.root,
        name=settings.name,
        checkpoint=weft.CheckpointConfig(every=settings.every),
    ) as driver:
        driver.run()


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
