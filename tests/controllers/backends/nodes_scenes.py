"""Scenes of `test_nodes.py`: runs on a Ray cluster of three nodes with separate files."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import ray
from nodes import Nodes
from saved_runs import SavingActor
from toy import SlowRollout, ToyActor, ToyReward, ToyRollout, prompts, toy_reinforce

from weft.controllers.backends.backend import Setup, this_node
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.group import WorkerGroup
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Pipelined, Synchronous
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.sample_buffer import BufferConfig
from weft.dataflow.errors import UserError, WorkerError
from weft.dataflow.graph import group
from weft.dataflow.metrics import Metrics
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote


def play(root: Path, nodes: Nodes) -> dict[str, object]:
    """Start with two nodes besides the head. A third joins, and one is lost."""
    nodes.grow_to(2)
    address = nodes.address
    return {
        **run(root, address),
        **apart(root, address),
        "hidden": hidden(root, address),
        **lost(root, nodes),
    }


def pools(ranks: int) -> dict[str, Place]:
    """Two pools that do not fit on one node together."""
    return {
        "rollout": Place(ResourcePool("generation", cpus=5), ranks=ranks),
        "reward": Place(ResourcePool("scoring", cpus=5), ranks=ranks),
        "actor": Place(ResourcePool("scoring", cpus=5)),
    }


def run(root: Path, address: str) -> dict[str, object]:
    made = {"rollout": group(ToyRollout), "reward": group(ToyReward), "actor": group(ToyActor)}
    graph = toy_reinforce(prompts(8), **made)
    schedule = Synchronous(steps=2, prompts_per_step=4)
    killed: list[int] = []
    others = {*segment_servers()}  # servers of other runs, which may still be shutting down

    def kill_servers(metrics: Mapping[str, float]) -> bool:
        """Kill the segment servers once, between two steps; readers on other nodes wait for new
        ones."""
        if metrics["step"] == 1:
            killed.extend({*segment_servers()} - others)
            for process in killed:
                os.kill(process, signal.SIGKILL)
        return False

    backend = RayBackend(address)
    driver = Driver(
        graph,
        schedule=schedule,
        placement=pools(2),
        backend=backend,
        root=root,
        name="nodes",
        record_every=0,
        progress=False,
        buffer=BufferConfig(scratch=root / "scratch"),
        stop=kill_servers,
    )
    with driver:
        metrics = driver.run()
        seen = driver.call(made["actor"], "seen_groups")
        stand = {
            name: dict(backend.stacks(driver.groups[name], range(2))) for name in ("rollout", "reward")
        }
        measured = watched(backend, 6)
        [scratch] = (root / "scratch").iterdir()
        folders = sorted(p for p in scratch.iterdir() if p.is_dir())
        wrote = {p.name: sorted({f.name.split(".")[0] for f in p.glob("*.arrows")}) for p in folders}
        fetched = {p.name: len(list(p.glob("fetched/*/*.arrows/*"))) for p in folders}
    return {
        "rewards": [row.get("reward/mean") for row in metrics],
        "seen": seen,
        "wrote": wrote,
        "fetched": fetched,
        "killed": len(killed),
        "stand": stand,
        "measured": measured,
    }


def watched(backend: RayBackend, processes: int) -> dict[str, list[str]]:
    """Wait until the memory of this many processes is known; return the processes by node."""
    deadline = time.monotonic() + 60
    while True:
        backend.wait(0.1)
        found = {node: sorted(memory.processes) for node, memory in backend.memory().items()}
        if sum(map(len, found.values())) == processes or time.monotonic() > deadline:
            return found


def segment_servers() -> list[int]:
    commands = {int(p.parent.name): p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline")}
    return [process for process, command in commands.items() if command.startswith(b"ray::_SegmentHost")]


class Apart(RayBackend):
    """Ranks that do not see the driver's run directory."""

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        (setup.run_dir / "buffer" / "scratch.json").unlink()
        return super().start(setup)


class Talking(ToyReward):
    """Prints a line and dies."""

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids", "answer"), writes=("reward",))
    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        print("the last words of a reward", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return super().score(samples)


def apart(root: Path, address: str) -> dict[str, object]:
    """Kill a rank on a machine that does not see the run's directory."""
    graph = toy_reinforce(
        prompts(8), rollout=group(ToyRollout), reward=group(Talking), actor=group(ToyActor)
    )
    driver = Driver(
        graph,
        schedule=Synchronous(steps=2, prompts_per_step=4),
        placement=pools(1),
        backend=Apart(address),
        root=root,
        buffer=BufferConfig(scratch=root / "scratch"),
        name="apart",
        progress=False,
    )
    said, recorder = "", ""
    with driver:
        recorder = driver._spec.backend.node_of(driver.groups["recorder"], 0)
        try:
            driver.run()
        except WorkerError as error:
            said = str(error)
        [scratch] = (
            path for path in (root / "scratch").iterdir() if path.name.startswith("weft-apart-")
        )
        kept = sorted(path.name for path in scratch.glob("*/logs/*.log"))
    return {
        "said": said,
        "recorder_here": recorder == this_node(),
        "kept_apart": kept,
        "brought": sorted(p.name for p in (root / "apart" / "logs").glob("*.log")),
    }


def hidden(root: Path, address: str) -> str:
    """Return the error when a group with checkpoints runs where the run's directory is not
    visible."""
    rollout, actor = group(ToyRollout), group(SavingActor)
    rollout.follows(actor)
    pool = ResourcePool("apart", cpus=5)
    driver = Driver(
        toy_reinforce(prompts(8), rollout=rollout, actor=actor),
        schedule=Synchronous(steps=2, prompts_per_step=4),
        placement={"rollout": Place(pool), "actor": Place(pool)},
        backend=Apart(address),
        checkpoint=CheckpointConfig(every=1),
        root=root,
        buffer=BufferConfig(scratch=root / "scratch"),
        name="hidden",
        record_every=0,
        progress=False,
    )
    try:
        with driver:
            return "not refused"
    except UserError as error:
        return str(error)


class Standing(ToyReward):
    replaceable = True

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


def lost(root: Path, nodes: Nodes) -> dict[str, object]:
    nodes.grow_to(3)
    rollout, reward, actor = group(SlowRollout), group(Standing), group(SavingActor)
    rollout.follows(actor)
    scoring = ResourcePool("scoring", cpus=5)
    training = ResourcePool("training", cpus=5)

    def lose(metrics: Mapping[str, float]) -> bool:
        if metrics["step"] == 3 and len(nodes.added) == 3:
            (stands_on,) = driver.call(reward, "node")
            nodes.lose(stands_on)
            time.sleep(3)  # its processes end when they notice the loss
        return False

    driver = Driver(
        toy_reinforce(prompts(10), rollout=rollout, reward=reward, actor=actor),
        schedule=Pipelined(steps=6, prompts_per_step=4),
        placement={"rollout": Place(training), "actor": Place(training), "reward": Place(scoring)},
        backend=RayBackend(nodes.address),
        checkpoint=CheckpointConfig(every=2),
        root=root,
        buffer=BufferConfig(scratch=root / "scratch"),
        name="lost",
        record_every=0,
        progress=False,
        stop=lose,
    )
    with driver:
        metrics = driver.run()
        weights = driver.call(actor, "weights")[0]
    return {
        "steps": [row["step"] for row in metrics],
        "trained": len({group for group, _ in weights}),
        "rows": len(weights),
        "violations": [str(v) for v in check_log(root / "lost" / "buffer").violations],
        "starts": driver.directory.starts,
        "replaced": metrics[-1].get("replaced_workers", 0),
        "nodes_left": len(nodes.added),
    }
