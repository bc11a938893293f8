"""A cluster of two nodes with a token, and runs that ask for it. Run by `test_cluster.py` as a program."""

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

from ray.cluster_utils import Cluster
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_grpo

from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.schedule import Synchronous
from weft.dataflow.errors import UserError
from weft.dataflow.handle import group


def said(what: str, do: Callable[[], object]) -> None:
    try:
        print(f"said {what}: {do()}", flush=True)
    except UserError as error:
        print(f"said {what}: {error}", flush=True)


def main(root: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    address, token = cluster.address, os.environ["RAY_AUTH_TOKEN"]
    assert address is not None
    try:
        os.environ["RAY_AUTH_TOKEN"] = "another's"
        said("another's", lambda: RayBackend(address).check({}))
        del os.environ["RAY_AUTH_MODE"]
        said("without", lambda: RayBackend(address).check({}))
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        said("too large", lambda: RayBackend(address).check({"actor": Place(ResourcePool("pool", cpus=3))}))
        said("rewards", lambda: rewards(root, address))
    finally:
        cluster.shutdown()


def rewards(root: Path, address: str) -> int:
    """A run whose pools are as large as the cluster."""
    made = {"rollout": group(ToyRollout), "reward": group(ToyReward), "actor": group(ToyActor)}
    with Driver(
        toy_grpo(prompts(4), **made),
        schedule=Synchronous(steps=2, prompts_per_step=2),
        placement={"actor": Place(ResourcePool("one", cpus=1)), "rollout": Place(ResourcePool("two", cpus=2))},
        backend=RayBackend(address),
        root=root,
        progress=False,
    ) as driver:
        return sum("reward/mean" in row for row in driver.run())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
