"""Two FSDP2 ranks on one Ray node, and then on two: prints the metrics of both runs, as one line of JSON. `fsdp_run.py MODEL ROOT`.

Run by `test_pools.py` as a program: a process can be connected to one cluster only.
"""

import json
import logging
import os
import secrets
import sys
from pathlib import Path
from typing import Any

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # a cluster by hand makes none, unlike ray.init

import numpy as np
import pyarrow as pa
import ray
from ray.cluster_utils import Cluster

from weft.algorithms.supervised import supervised
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.schedule import Synchronous
from weft.dataflow.handle import group
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker
from weft.workers.dispatch import Dispatch
from weft.workers.remote import remote


class StandingActor(ActorWorker):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


def rows() -> TableSource:
    rng = np.random.default_rng(0)
    ids = [rng.integers(1, 97, rng.integers(2, 9)).tolist() for _ in range(32)]
    table = {
        "prompt_ids": pa.array(ids[:16], pa.list_(pa.int32())),
        "response_ids": pa.array(ids[16:], pa.list_(pa.int32())),
    }
    return TableSource("rows", pa.table(table))


def train(model: str, root: Path, pool: ResourcePool, address: str) -> dict[str, Any]:
    actor: Any = group(StandingActor, name="actor", model=model, learning_rate=1e-2)
    driver = Driver(
        supervised(rows(), actor=actor),
        schedule=Synchronous(steps=2, prompts_per_step=8),
        placement={"actor": Place(pool, ranks=2)},
        backend=RayBackend(address),
        root=root,
        name=pool.name,
        record_every=0,
        progress=False,
    )
    with driver:
        metrics = driver.run()
        nodes = driver.call(actor, "node")
    kept = ("actor/loss", "actor/grad_norm")
    return {"nodes": len({*nodes}), "steps": [{k: row[k] for k in kept} for row in metrics[1:]]}


def main(model: str, root: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    assert cluster.address is not None
    ray.init(address=cluster.address, namespace="weft", log_to_driver=False, logging_level=logging.ERROR)
    try:
        pools = ResourcePool("one", nodes=1, cpus=2), ResourcePool("two", nodes=2, cpus_per_node=1)
        print(json.dumps([train(model, root, pool, cluster.address) for pool in pools]))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
