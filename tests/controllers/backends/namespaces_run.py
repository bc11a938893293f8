"""GRPO on two Ray nodes that share no process, network, memory or writable folder. Prints one line
of JSON.

`test_namespaces.py` runs this on the first node, next to the head of the cluster. The model, the
user's module and the run's directory are in `/tmp` of this node, which no other node sees.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import tokenizers
from sharded import make_model
from tokenizers import models

from weft.algorithms.grpo import grpo
from weft.algorithms.sampling import Sampling
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Pipelined
from weft.dataflow.buffer.check import check_log
from weft.dataflow.graph import group
from weft.dataflow.runs.samples import sample_files
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker
from weft.workers.dispatch import Dispatch
from weft.workers.reward import RewardWorker
from weft.workers.rollout import RolloutWorker
from weft.workers.worker import Worker, remote

ROOT = Path("/tmp/weft")
STEPS = 3


def seen_by(worker: Worker) -> dict[str, Any]:
    """Return what a rank knows about its place."""
    return {
        "host": os.uname().nodename,
        "model": str(getattr(worker.config, "model", "")),
        "sees_run": (ROOT / "runs").exists(),
    }


class Actor(ActorWorker):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, Any]:
        return seen_by(self)


class Rollout(RolloutWorker):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, Any]:
        return seen_by(self)


class Reward(RewardWorker):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, Any]:
        return seen_by(self)


def main(address: str) -> None:
    (ROOT / "project").mkdir(parents=True)
    (ROOT / "project" / "my_rewards.py").write_text(
        "def length(response: str) -> float:\n    return float(len(response) % 3)\n"
    )
    sys.path.insert(0, str(ROOT / "project"))
    from my_rewards import length  # pyright: ignore[reportMissingImports]

    model = make_model(ROOT / "model")
    words = tokenizers.Tokenizer(models.WordLevel({"w" * i: i for i in range(97)}, unk_token="w"))
    words.save(str(model / "tokenizer.json"))
    made: dict[str, Any] = {
        "rollout": group(Rollout, model=str(model), engine="transformers"),
        "reward": group(Reward, function=length, tokenizer=str(model)),
        "actor": group(Actor, model=str(model), learning_rate=1e-2),
    }
    made["rollout"].follows(made["actor"])
    elsewhere = ResourcePool("generate", cpus=3)
    rows = TableSource("prompts", pa.table({"prompt_ids": [[5 + i, 7] for i in range(8)]}))
    driver = Driver(
        grpo(rows, **made, n=4, sampling=Sampling(max_tokens=4)),
        schedule=Pipelined(steps=STEPS, prompts_per_step=4),
        placement={
            "rollout": Place(elsewhere, ranks=2),
            "reward": Place(elsewhere),
            "actor": Place(ResourcePool("train", cpus=1)),
        },
        backend=RayBackend(address, wait_s=120, working_dir=ROOT / "project"),
        checkpoint=CheckpointConfig(every=2),
        root=ROOT / "runs",
        name="apart",
        progress=False,
    )
    with driver:
        metrics = driver.run()
        looks = {who: driver.call(handle, "look") for who, handle in made.items()}
    run = ROOT / "runs" / "apart"
    print(
        json.dumps(
            {
                "steps": [row["step"] for row in metrics],
                "rows": sum(len(file.rows()) for file in sample_files(run)),
                "looks": looks,
                "violations": [str(one) for one in check_log(run / "buffer").violations],
                "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
                "logs": sorted(path.name for path in (run / "logs").glob("*.log")),
                "versions": [
                    sorted({*file.rows()["response_versions"].combine_chunks().flatten().to_pylist()})
                    for file in sample_files(run)
                ],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
