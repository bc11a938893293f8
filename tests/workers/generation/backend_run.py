"""A run with weights over a vLLM transfer backend, registered on both sides: worker classes and
graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from backend_ranks import BackendConfig, without_gpus

import weft
from weft.algorithms.policy_loss import NegativeLogLikelihood
from weft.algorithms.sampling import Sampling
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker
from weft.workers.rollout import RolloutWorker
from weft.workers.worker import Context


class BackendActor(ActorWorker):
    Config = BackendConfig

    def __init__(self, config: BackendConfig, context: Context = Context()) -> None:
        without_gpus(setattr)
        super().__init__(config, context)


class BackendRollout(RolloutWorker):
    def __init__(self, config: Any, context: Context = Context()) -> None:
        super().__init__(config, context)
        without_gpus(setattr)


@weft.graph
def imitate(prompts: Any, *, rollout: BackendRollout, actor: BackendActor) -> Any:
    samples: Any = rollout.generate(prompts, n=2, sampling=Sampling(max_tokens=8, stop=None))
    return actor.update(samples, loss=NegativeLogLikelihood())


def run(folder: Path, root: Path, backend: str) -> list[dict[str, float]]:
    """Run three steps with two FSDP ranks and a vLLM engine, and return the metrics."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 32, 4).astype(np.int32) for _ in range(4)]
    source = TableSource("prompts", pa.table({"prompt_ids": pa.array(ids, pa.list_(pa.int32()))}))
    actor = weft.group(BackendActor, model=folder, transport=f"vllm:{backend}", learning_rate=1e-2)
    rollout = weft.group(BackendRollout, model=folder, max_num_seqs=8, kv_cache_gib=0.05)
    rollout.follows(actor)
    placement = {
        "actor": weft.Place(weft.ResourcePool("train", cpus=1), ranks=2),
        "rollout": weft.Place(weft.ResourcePool("generate", cpus=1)),
    }
    with weft.Driver(
        imitate(source, rollout=rollout, actor=actor),
        schedule=weft.Synchronous(steps=3, prompts_per_step=4),
        placement=placement,
        backend=weft.RayBackend(),
        root=root,
        progress=False,
        record_every=0,
        call_timeout_s=600,
    ) as driver:
        return driver.run()


def main(folder: str, root: str, backend: str) -> None:
    print(json.dumps(run(Path(folder), Path(root), backend)))
