"""A run on a Ray cluster of three nodes on this machine, each with files of its own. Prints one line of JSON.

Run by `test_nodes.py` as a program: a process can be connected to one cluster only.
"""

import json
import logging
import os
import secrets
import sys
from pathlib import Path

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # a cluster by hand makes none, unlike ray.init

import ray
from ray.cluster_utils import Cluster
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_grpo

from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.ray_backend import RayBackend
from weft.controllers.schedule import Synchronous
from weft.dataflow.errors import UserError
from weft.dataflow.handle import group


def main(root: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=4)
    address = cluster.address
    assert address is not None
    ray.init(address=address, namespace="weft", log_to_driver=False, logging_level=logging.ERROR)
    try:
        print(json.dumps({**run(root, address), "refused": refused(root, address)}))
    finally:
        ray.shutdown()
        cluster.shutdown()


def pools() -> dict[str, Place]:
    """Two pools that fit on no node together."""
    return {
        "rollout": Place(ResourcePool("generation", cpus=3), ranks=2),
        "reward": Place(ResourcePool("scoring", cpus=3), ranks=2),
        "actor": Place(ResourcePool("scoring", cpus=3)),
    }


def run(root: Path, address: str) -> dict[str, object]:
    made = {"rollout": group(ToyRollout), "reward": group(ToyReward), "actor": group(ToyActor)}
    graph = toy_grpo(prompts(8), **made)
    schedule = Synchronous(steps=2, prompts_per_step=4)
    driver = Driver(
        graph,
        schedule=schedule,
        placement=pools(),
        backend=RayBackend(address),
        root=root,
        name="nodes",
        progress=False,
    )
    with driver:
        metrics = driver.run()
        seen = driver.call(made["actor"], "seen_groups")
        folders = sorted(p for p in (root / "nodes" / "buffer" / "segments").iterdir())
        wrote = {p.name: sorted({f.name.split(".")[0] for f in p.glob("*.arrows")}) for p in folders}
        fetched = {p.name: len(list(p.glob("fetched/*/*.arrows.*"))) for p in folders}
    return {"rewards": [row.get("reward/mean") for row in metrics], "seen": seen, "wrote": wrote, "fetched": fetched}


def refused(root: Path, address: str) -> str:
    made = {"rollout": group(ToyRollout), "reward": group(ToyReward), "actor": group(ToyActor)}
    made["rollout"].follows(made["actor"])
    graph = toy_grpo(prompts(8), **made)
    schedule = Synchronous(steps=2, prompts_per_step=4)
    try:
        with Driver(
            graph,
            schedule=schedule,
            placement=pools(),
            backend=RayBackend(address),
            root=root,
            name="no",
            progress=False,
        ):
            return "not refused"
    except UserError as error:
        return str(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
