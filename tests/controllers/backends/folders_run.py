"""A run on two Ray nodes of which the second sees neither the user's modules nor the folder of the model. Prints one line of JSON.

Run by `test_folders.py` as a program: a process can be connected to one cluster only. Both nodes are this machine, and differ in what their
paths lead to: the model, and the cache of the hub, are below the home of the user, which is another on the second node, and the modules are
below the folder that a process works in.
"""

import json
import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # a cluster by hand makes none, unlike ray.init

import ray
from ray.cluster_utils import Cluster
from toy import ToyActor, ToyLoss, prompts

from weft.algorithms.sampling import Sampling
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.schedule import Synchronous
from weft.dataflow.errors import WeftError
from weft.dataflow.handle import group
from weft.dataflow.tracing import graph
from weft.workers.dispatch import Dispatch
from weft.workers.remote import remote
from weft.workers.reward import RewardWorker
from weft.workers.rollout import RolloutWorker
from weft.workers.worker import Worker

MODEL = "~/models/tiny"
HUB_ID = "somebody/tiny"
PROJECT = "/proc/self/cwd/project"
"""In this process the folder of the user's modules, in a rank nothing."""


def paths_of(worker: Worker) -> dict[str, str]:
    """What a rank finds where."""
    named = {name: str(value) for name, value in dict(worker.config).items() if name in ("model", "tokenizer")}
    return {**named, "home": str(Path.home()), "folder": str(Path.cwd())}


class Rollout(RolloutWorker):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, str]:
        return paths_of(self)


class Reward(RewardWorker):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, str]:
        return paths_of(self)


@graph
def scored(source: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
    samples = rollout.generate(source, n=2, sampling=Sampling(max_tokens=3))
    return actor.update(reward.score(samples), loss=ToyLoss(column="reward"))


def main(root: Path, model: Path) -> None:
    homes = root / "home", root / "home_of_node_2"
    for path in (root / "project", root / "elsewhere", *homes):
        path.mkdir()
    shutil.copytree(model, homes[0] / "models" / "tiny")
    cached = homes[0] / ".cache" / "huggingface" / "hub" / "models--somebody--tiny"
    shutil.copytree(model, cached / "snapshots" / "tiny")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("tiny")
    (root / "project" / "my_rewards.py").write_text(
        "def length(response: str) -> float:\n    return float(len(response))\n"
    )
    (root / "project" / "runs").mkdir()
    (root / "project" / "runs" / "large").write_bytes(b"x")
    os.chdir(root / "elsewhere")
    os.environ["HOME"] = str(homes[0])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    os.environ["HOME"] = str(homes[1])
    cluster.add_node(num_cpus=6)
    os.environ["HOME"] = str(homes[0])
    os.chdir(root)
    sys.path.insert(0, PROJECT)
    assert cluster.address is not None
    try:
        without = drive(root, "without", RayBackend(cluster.address), MODEL)
        backend = RayBackend(cluster.address, working_dir=PROJECT)
        sent = drive(root, "sent", backend, MODEL, HUB_ID)
        seen = drive(root, "seen", backend, str(homes[0] / "models" / "tiny"))
        print(json.dumps({"without": without, "sent": sent, "seen": seen}))
    finally:
        ray.shutdown()
        cluster.shutdown()


def drive(root: Path, name: str, backend: RayBackend, model: str, tokenizer: str = MODEL) -> Any:
    """A run whose rollouts and rewards are on the second node."""
    from my_rewards import length  # pyright: ignore[reportMissingImports]

    pool = ResourcePool("generate", cpus=5)
    made: dict[str, Any] = {
        "rollout": group(Rollout, model=model, engine="transformers"),
        "reward": group(Reward, function=length, tokenizer=tokenizer),
        "actor": group(ToyActor),
    }
    places = {"rollout": Place(pool, ranks=2), "reward": Place(pool), "actor": Place(ResourcePool("train", cpus=1))}
    try:
        driver = Driver(
            scored(prompts(8), **made),
            schedule=Synchronous(steps=1, prompts_per_step=4),
            placement=places,
            backend=backend,
            root=root / "runs",
            name=name,
            record_every=0,
            progress=False,
        )
        with driver:
            rows = [row["actor/rows"] for row in driver.run()[1:]]
            looks = {who: driver.call(made[who], "look") for who in ("rollout", "reward")}
    except WeftError as error:
        return str(error)
    cache = root / "home_of_node_2" / ".cache" / "weft" / "folders"
    copies = {path.name: sorted(p.name for p in path.iterdir()) for path in cache.iterdir() if path.is_dir()}
    return {"rows": rows, "looks": looks, "copies": copies}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
