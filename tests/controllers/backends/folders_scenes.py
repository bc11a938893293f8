"""Scenes of `test_folders.py`: the second of two Ray nodes sees neither the user's modules nor the
model.

The model and the hub's cache are below the user's home, which differs on the second node. The
modules are below the working directory of the process.
"""

import os
import sys
from pathlib import Path
from typing import Any

from nodes import Nodes
from tiny_model import save_model
from toy import ToyActor, ToyLoss, ToyRollout, prompts, toy_reinforce

from weft.algorithms.sampling import Sampling
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.schedule import Synchronous
from weft.dataflow.errors import WeftError
from weft.dataflow.graph import group
from weft.dataflow.tracing import graph
from weft.workers.dispatch import Dispatch
from weft.workers.reward import RewardWorker
from weft.workers.rollout import RolloutWorker
from weft.workers.worker import Worker, remote

MODEL = "~/models/tiny"
HUB_ID = "somebody/tiny"
PROJECT = "/proc/self/cwd/project"
"""The folder of the user's modules in this process; it does not exist in a rank."""


def paths_of(worker: Worker) -> dict[str, str]:
    """Return the paths that a rank uses."""
    named = {
        name: str(value) for name, value in dict(worker.config).items() if name in ("model", "tokenizer")
    }
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
def scored(source: Any, *, rollout: Any, reward: Any, judge: Any, actor: Any) -> Any:
    samples = reward.score(rollout.generate(source, n=2, sampling=Sampling(max_tokens=3)))
    return actor.update(judge.score(samples, into="judged"), loss=ToyLoss(column="reward"))


def play(root: Path, nodes: Nodes) -> dict[str, Any]:
    """Play on the head and one more node."""
    project, home = root / "project", Path.home()
    project.mkdir()
    (project / "my_rewards.py").write_text(
        "def length(response: str) -> float:\n    return float(len(response))\n"
    )
    (project / "runs").mkdir()
    (project / "runs" / "large").write_bytes(b"x")
    save_model(home / "models" / "tiny")
    cached = home / ".cache" / "huggingface" / "hub" / "models--somebody--tiny"
    save_model(cached / "snapshots" / "tiny")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("tiny")
    before = Path.cwd()
    os.chdir(root)
    sys.path.insert(0, PROJECT)
    try:
        return {"without": without(root, nodes), "sent": sent(root, nodes)}
    finally:
        sys.path.remove(PROJECT)
        os.chdir(before)


def without(root: Path, nodes: Nodes) -> str:
    """Return the error of a reward on a node that does not see its module."""
    from my_rewards import length  # pyright: ignore[reportMissingImports]

    made = {"reward": group(Reward, function=length, tokenizer=MODEL), "actor": group(ToyActor)}
    graph = toy_reinforce(prompts(8), rollout=group(ToyRollout), **made)
    driver = driver_of(
        root,
        "without",
        graph,
        {"reward": Place(ResourcePool("score", cpus=5))},
        RayBackend(nodes.address),
    )
    try:
        with driver:
            return "not refused"
    except WeftError as error:
        return str(error)


def sent(root: Path, nodes: Nodes) -> dict[str, Any]:
    """Run with rollout and rewards on the second node."""
    from my_rewards import length  # pyright: ignore[reportMissingImports]

    seen = str(Path.home() / "models" / "tiny")
    made: dict[str, Any] = {
        "rollout": group(Rollout, model=MODEL, engine="transformers"),
        "reward": group(Reward, name="reward", function=length, tokenizer=HUB_ID),
        "judge": group(Reward, name="judge", function=length, tokenizer=seen),
        "actor": group(ToyActor),
    }
    pool = ResourcePool("generate", cpus=5)
    places = {name: Place(pool) for name in ("rollout", "reward", "judge")}
    places["actor"] = Place(ResourcePool("train", cpus=1))
    backend = RayBackend(nodes.address, working_dir=PROJECT)
    with driver_of(root, "sent", scored(prompts(8), **made), places, backend) as driver:
        rows = [row["actor/rows"] for row in driver.run()[1:]]
        looks = {who: driver.call(made[who], "look") for who in ("rollout", "reward", "judge")}
    cache = nodes.home / ".cache" / "weft" / "folders"
    copies = {
        path.name: sorted(p.name for p in path.iterdir()) for path in cache.iterdir() if path.is_dir()
    }
    return {"rows": rows, "looks": looks, "copies": copies}


def driver_of(
    root: Path, name: str, graph: Any, placement: dict[str, Place], backend: RayBackend
) -> Driver:
    return Driver(
        graph,
        schedule=Synchronous(steps=1, prompts_per_step=4),
        placement=placement,
        backend=backend,
        root=root / "runs",
        name=name,
        record_every=0,
        progress=False,
    )
