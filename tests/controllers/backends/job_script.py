"""GRPO with a tiny model, as a user's script for `test_job_server.py`. Prints a digest of the
weights.

It runs in this process, on a local Ray, or as a job of a cluster.
"""

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa

import weft
from weft.algorithms.grpo import grpo
from weft.algorithms.sampling import Sampling
from weft.controllers.backends.local import Local
from weft.controllers.backends.ray_backend import RayBackend
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker
from weft.workers.dispatch import Dispatch
from weft.workers.reward import RewardWorker
from weft.workers.rollout import RolloutWorker
from weft.workers.worker import remote


class Actor(ActorWorker):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def digest(self) -> str:
        """Hash the bytes of all weights."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.engine.named_tensors()):
            found.update(name.encode())
            found.update(tensor.contiguous().numpy().tobytes())
        return found.hexdigest()


def length(response: str) -> float:
    return float(len(response) % 3)


class Settings(weft.Config):
    model: Path
    until: int
    """The last step of the run."""
    in_process: bool = False
    """Run without Ray."""


def main(settings: Settings) -> None:
    """Train with GRPO."""
    model = settings.model
    rollout: Any = weft.group(RolloutWorker, model=str(model), engine="transformers")
    reward: Any = weft.group(RewardWorker, function=length, tokenizer=str(model))
    actor: Any = weft.group(Actor, model=str(model), learning_rate=1e-2)
    rollout.follows(actor)
    rows = TableSource("prompts", pa.table({"prompt_ids": [[5 + i, 7] for i in range(8)]}))
    with weft.Driver(
        grpo(rows, rollout=rollout, reward=reward, actor=actor, n=4, sampling=Sampling(max_tokens=4)),
        schedule=weft.Synchronous(steps=100_000, prompts_per_step=4),
        backend=Local() if settings.in_process else RayBackend(),
        checkpoint=weft.CheckpointConfig(every=1),
        stop=lambda metrics: metrics["step"] >= settings.until,
        progress="plain",
    ) as driver:
        driver.run()
        print("digest", driver.call(actor, "digest")[0], flush=True)


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
