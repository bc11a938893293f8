"""Pools over several Ray nodes on this machine, some with GPUs that are pretended. Prints one line of JSON.

Run by `test_pools.py` as a program: a process can be connected to one cluster only.
"""

import json
import logging
import os
import secrets
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
os.environ |= {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}  # those would serve nobody
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # a cluster by hand makes none, unlike ray.init

import ray
from ray.cluster_utils import Cluster
from sharded import make_model, sent, updated
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_reinforce

from weft.controllers.backends.backend import Setup
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.group import WorkerGroup
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.schedule import Synchronous
from weft.dataflow.errors import UserError
from weft.dataflow.handle import group
from weft.workers.dispatch import Dispatch
from weft.workers.remote import remote
from weft.workers.worker import Worker

GPUS = 2


def seen_by(worker: Worker) -> dict[str, Any]:
    """What a rank knows of where it stands."""
    at = worker.context
    return {
        "rank": [at.rank, at.world_size, at.local_rank, at.node_rank, at.nodes],
        "devices": list(at.devices),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "node": ray.get_runtime_context().get_node_id(),
        "host": at.rendezvous.host if at.rendezvous else None,
    }


class Noting:
    """Notes when a worker is made and offloaded, in a file that all share."""

    context: Any

    def note(self, what: str) -> None:
        with (self.context.run_dir / "order").open("a") as file:
            file.write(f"{self.context.name}[{self.context.rank}] {what}\n")


class LookingActor(Noting, ToyActor):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.note("begins")
        time.sleep(0.3)
        self.note("made")

    def offload(self) -> None:
        self.note("offloaded")

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, Any]:
        return seen_by(self)


class LookingRollout(Noting, ToyRollout):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.note("begins")
        self.note("made")

    def offload(self) -> None:
        self.note("offloaded")

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, Any]:
        return seen_by(self)


class LookingReward(ToyReward):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, Any]:
        return seen_by(self)


def main(root: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=8, num_gpus=GPUS)
    assert cluster.address is not None
    ray.init(address=cluster.address, namespace="weft", log_to_driver=False, logging_level=logging.ERROR)
    try:
        result = {
            "over": over_nodes(root, cluster.address),
            "trained": trained(root, cluster.address),
            "shared": shared(root, cluster.address),
            "beside": beside(root, cluster.address),
            "apart": apart(root, cluster.address),
            **grows(root, cluster),
        }
        print(json.dumps(result))
    finally:
        ray.shutdown()
        cluster.shutdown()


def drive(
    root: Path, name: str, placement: dict[str, Place], backend: RayBackend, *, follows: bool = True
) -> dict[str, Any]:
    """A run of two steps; what each rank saw, and in which order workers were made. There is a reward if it is placed."""
    made: dict[str, Any] = {"rollout": group(LookingRollout), "actor": group(LookingActor)}
    if "reward" in placement:
        made["reward"] = group(LookingReward)
    if follows:
        made["rollout"].follows(made["actor"])
    schedule = Synchronous(steps=2, prompts_per_step=4)
    driver = Driver(
        toy_reinforce(prompts(8), **made, column="response_logprobs" if follows else "response_ids"),
        schedule=schedule,
        placement=placement,
        backend=backend,
        root=root,
        name=name,
        record_every=0,
        progress=False,
    )
    with driver:
        rows = [row["actor/rows"] for row in driver.run()[1:]]
        looks = {who: driver.call(handle, "look") for who, handle in made.items()}
        order = (driver.directory.path / "order").read_text().splitlines()
    return {"rows": rows, "looks": looks, "order": order}


def over_nodes(root: Path, address: str) -> dict[str, Any]:
    """All GPUs of both nodes, a rank on each, and a CPU pool over both."""
    train = ResourcePool("train", gpus=2 * GPUS)
    score = ResourcePool("score", nodes=2, cpus_per_node=2)
    placement = {"actor": Place(train, 2 * GPUS), "reward": Place(score, 2)}
    return drive(root, "over", placement, RayBackend(address), follows=False)


def trained(root: Path, address: str) -> dict[str, Any]:
    """Two FSDP2 ranks, each on a node of its own."""
    placement = {"actor": Place(ResourcePool("train", nodes=2, cpus_per_node=1), 2)}
    return updated(root, "trained", make_model(root / "model"), placement, RayBackend(address))


def shared(root: Path, address: str) -> dict[str, Any]:
    """Two groups on one pool with GPUs."""
    pool = ResourcePool("both", gpus=GPUS)
    return drive(root, "shared", {"actor": Place(pool, 2), "rollout": Place(pool, 2)}, RayBackend(address))


def beside(root: Path, address: str) -> dict[str, Any]:
    """A leader and its follower on separate devices of one node."""
    train, generate = ResourcePool("train", gpus=1), ResourcePool("generate", gpus=1, beside="train")
    return drive(root, "beside", {"actor": Place(train), "rollout": Place(generate)}, RayBackend(address))


def apart(root: Path, address: str) -> dict[str, Any]:
    """Two FSDP2 ranks on two nodes, and a reference on another pool, which believes that it is on another machine."""
    pools = [ResourcePool("train", nodes=2, cpus_per_node=1), ResourcePool("compare", cpus=1)]
    placement = {"actor": Place(pools[0], 2), "reference": Place(pools[1])}
    return sent(root, "apart", root / "model", placement, RayBackend(address))


def error_of(root: Path, name: str, placement: dict[str, Place], backend: RayBackend) -> str:
    try:
        drive(root, name, placement, backend, follows=False)
    except UserError as error:
        return str(error)
    return "not refused"


class GrowingRay(RayBackend):
    """A cluster to which a node is added when the user is told what is missing."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.address, wait_s=60.0)
        self._added, self.told = cluster, list[str]()

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        return super().start(replace(setup, tell=self._tell))

    def _tell(self, line: str) -> None:
        if not self.told:
            self._added.add_node(num_cpus=8, num_gpus=GPUS)
        self.told.append(line)


def grows(root: Path, cluster: Cluster) -> dict[str, Any]:
    """A pool that is larger than the cluster, to which a node is added while it is waited for."""
    placement = {"actor": Place(ResourcePool("train", nodes=3, gpus_per_node=GPUS), 3)}
    assert cluster.address is not None
    too_large = error_of(root, "too_large", placement, RayBackend(cluster.address))
    in_vain = error_of(root, "in_vain", placement, RayBackend(cluster.address, wait_s=2.0))
    growing = GrowingRay(cluster)
    found = drive(root, "grown", placement, growing, follows=False)
    return {"too_large": too_large, "in_vain": in_vain, "grown": found, "told": growing.told}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
