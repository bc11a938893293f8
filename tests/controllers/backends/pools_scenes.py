"""Scenes of `test_pools.py`: pools over several Ray nodes, with GPUs that are not real."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from nodes import CPUS, Nodes
from sharded import make_model, updated
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_reinforce

from weft.controllers.backends.backend import Setup
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.group import WorkerGroup
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.schedule import Synchronous
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.workers.dispatch import Dispatch
from weft.workers.worker import Worker, remote


def seen_by(worker: Worker) -> dict[str, Any]:
    """Return what a rank knows about its place."""
    at = worker.context
    return {
        "rank": [at.rank, at.world_size, at.local_rank, at.node_rank, at.nodes],
        "devices": list(at.devices),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "node": ray.get_runtime_context().get_node_id(),
        "host": at.rendezvous.host if at.rendezvous else None,
    }


class Noting:
    """Notes in a shared file when a worker is created and offloaded."""

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


class LookingReward(Noting, ToyReward):
    @classmethod
    def default_ranks(cls, config: Any, cpus: int) -> int:
        assert cpus == CPUS
        return 3

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.note("made")

    def offload(self) -> None:
        self.note("offloaded")

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, Any]:
        return seen_by(self)


def play(root: Path, nodes: Nodes) -> dict[str, Any]:
    """Start with one node besides the head, and end with two."""
    return {
        **grows(root, nodes),
        "shared": shared(root, nodes.address),
        "trained": trained(root, nodes.address),
        "spare": unplaced(root, nodes.address, "spare", cpus=2),
        "full": unplaced(root, nodes.address, "full", cpus=2 * CPUS),
    }


def drive(
    root: Path,
    name: str,
    placement: dict[str, Place],
    backend: RayBackend,
    *,
    follows: bool = True,
    scores: bool = False,
) -> dict[str, Any]:
    """Run two steps; return the view of each rank and the order of worker creation.

    There is a reward if it is placed, or with `scores`.
    """
    made: dict[str, Any] = {"rollout": group(LookingRollout), "actor": group(LookingActor)}
    if "reward" in placement or scores:
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


def shared(root: Path, address: str) -> dict[str, Any]:
    """Place two groups on one GPU pool, and a third on a separate GPU of the same node."""
    pool, beside = ResourcePool("both", gpus=2), ResourcePool("score", gpus=1, beside="both")
    placement = {"actor": Place(pool, 2), "rollout": Place(pool, 2), "reward": Place(beside)}
    return drive(root, "shared", placement, RayBackend(address))


def unplaced(root: Path, address: str, name: str, *, cpus: int) -> dict[str, Any]:
    """Place no reward, beside a pool with some or all CPUs of the two nodes with GPUs."""
    pool = ResourcePool("train", cpus=cpus, gpus=2, nodes=2)
    placement = {"actor": Place(pool, 2), "rollout": Place(pool, 2)}
    return drive(root, name, placement, RayBackend(address), scores=True)


def trained(root: Path, address: str) -> dict[str, Any]:
    """Train two FSDP2 ranks on two nodes, with a reference that believes it is on a third
    machine."""
    pools = [ResourcePool("train", nodes=2, cpus_per_node=1), ResourcePool("compare", cpus=1)]
    placement = {"actor": Place(pools[0], 2), "reference": Place(pools[1])}
    return updated(root, "trained", make_model(root / "model"), placement, RayBackend(address))


def error_of(root: Path, name: str, placement: dict[str, Place], backend: RayBackend) -> str:
    try:
        drive(root, name, placement, backend, follows=False)
    except UserError as error:
        return str(error)
    return "not refused"


class GrowingRay(RayBackend):
    """A backend that adds a node when it tells the user what is missing."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes.address, wait_s=60.0)
        self._nodes, self.told = nodes, list[str]()

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        return super().start(replace(setup, tell=self._tell))

    def _tell(self, line: str) -> None:
        if not self.told:
            self._nodes.add()
        self.told.append(line)


def grows(root: Path, nodes: Nodes) -> dict[str, Any]:
    """Wait for a pool larger than the cluster while a node joins.

    The pool has two GPUs and two ranks per node; a CPU pool spans both nodes.
    """
    four = {"actor": Place(ResourcePool("train", gpus=4), 4)}
    too_large = error_of(root, "too_large", four, RayBackend(nodes.address))
    train = {"actor": Place(ResourcePool("train", nodes=2, gpus_per_node=2), 4)}
    in_vain = error_of(root, "in_vain", train, RayBackend(nodes.address, wait_s=1.0))
    placement = {**train, "reward": Place(ResourcePool("score", nodes=2, cpus_per_node=2), 2)}
    growing = GrowingRay(nodes)
    grown = drive(root, "grown", placement, growing, follows=False)
    return {"too_large": too_large, "in_vain": in_vain, "grown": grown, "told": growing.told}
