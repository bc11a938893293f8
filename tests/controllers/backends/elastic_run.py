"""An elastic reward on a Ray cluster that gains and loses nodes. Prints one line of JSON.

`test_elastic_nodes.py` runs this as a program, because a process can connect to one cluster only.
"""

import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
# unlike ray.init, a cluster started by hand creates none
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

import ray
from ray.cluster_utils import Cluster
from saved_runs import SavingActor
from toy import SlowRollout, ToyConfig, ToyReward, prompts, toy_reinforce

from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.schedule import Synchronous
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.sample_buffer import BufferConfig
from weft.dataflow.graph import group
from weft.dataflow.metrics import Metrics
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote


class SpotConfig(ToyConfig):
    folder: Path
    """Folder for files that announce the removal of a node, and that a rank scores on it."""


class SpotReward(ToyReward):
    Config = SpotConfig
    replaceable = True

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids", "answer"), writes=("reward",))
    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        if str(self.context.rank) in read(self.config.folder / "to_be_taken") and len(samples):
            (self.config.folder / "scoring").touch()
            time.sleep(60)
        return super().score(samples)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def look(self) -> tuple[int, list[str], str]:
        return self.context.rank, list(self.context.devices), os.environ["CUDA_VISIBLE_DEVICES"]


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


class Nodes:
    """Adds and removes nodes when the reward reaches the expected number of ranks.

    Instances are called after each step.

    Args:
        cluster: cluster whose first node has room for one rank.
        reward: handle of the reward.
        folder: the `folder` of the reward's settings.
    """

    def __init__(self, cluster: Cluster, reward: Any, folder: Path) -> None:
        self._cluster, self._reward, self._folder = cluster, reward, folder
        self.driver: Any = None
        self.looks: list[list[tuple[int, list[str], str]]] = []
        """Places of the ranks, each time the expected number is reached."""

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        time.sleep(0.1)
        if metrics["reward/ranks"] != (1, 3, 1, 2)[len(self.looks)]:
            return False
        self.looks.append(sorted(self.driver.call(self._reward, "look")))
        if len(self.looks) == 1:
            self._added = self._cluster.add_node(num_cpus=2, num_gpus=2)
        elif len(self.looks) == 2:
            joined = {rank for rank, *_ in self.looks[1]} - {rank for rank, *_ in self.looks[0]}
            (self._folder / "to_be_taken").write_text(" ".join(map(str, joined)))
            threading.Thread(target=self._take).start()
        elif len(self.looks) == 3:
            (self._folder / "to_be_taken").unlink()
            self._cluster.add_node(num_cpus=2, num_gpus=1)
        return len(self.looks) == 4

    def _take(self) -> None:
        """Remove the added node while it scores rows."""
        while not (self._folder / "scoring").exists():
            time.sleep(0.01)
        self._cluster.remove_node(self._added, allow_graceful=False)


def main(root: Path) -> None:
    head = {"num_cpus": 4, "num_gpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    assert cluster.address is not None
    ray.init(address=cluster.address, namespace="weft", log_to_driver=False, logging_level=logging.ERROR)
    try:
        print(json.dumps(run(root, cluster)))
    finally:
        ray.shutdown()
        cluster.shutdown()


def run(root: Path, cluster: Cluster) -> dict[str, Any]:
    rollout, reward, actor = group(SlowRollout), group(SpotReward, folder=root), group(SavingActor)
    rollout.follows(actor)
    training = ResourcePool("training", cpus=1)
    nodes = Nodes(cluster, reward, root)
    driver = nodes.driver = Driver(
        toy_reinforce(prompts(10), rollout=rollout, reward=reward, actor=actor),
        schedule=Synchronous(steps=2000, prompts_per_step=4),
        placement={
            "rollout": Place(training),
            "actor": Place(training),
            "reward": Place(ResourcePool("spot", cpus=3, gpus=3), ranks=3, min_ranks=1),
        },
        backend=RayBackend(cluster.address),
        root=root,
        buffer=BufferConfig(scratch=root / "scratch"),
        name="elastic",
        record_every=0,
        stop=nodes,
    )
    with driver:
        metrics = driver.run()
        weights = driver.call(actor, "weights")[0]
    return {
        "looks": nodes.looks,
        "starts": driver.directory.starts,
        "rows": len(weights),
        "trained": len({group for group, _ in weights}),
        "steps": len(metrics) - 1,
        "repeated": metrics[-1].get("requeued_rows", 0),
        "violations": [str(v) for v in check_log(root / "elastic" / "buffer").violations],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
