"""Runs of toy workers on a fake clock, with the costs of their calls, and readers of their logs."""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from toy import ToyActor, ToyLoss, ToyReward, ToyRollout, prompts, toy_grpo

from weft.controllers.backends.backend import Cluster
from weft.controllers.backends.local import Local
from weft.controllers.driver import Driver
from weft.controllers.group import WorkerGroup
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.schedule import Training
from weft.controllers.simulation.backend import Simulated
from weft.controllers.simulation.costs import (
    CostModel,
    Generation,
    LinearCost,
    LogNormal,
)
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.graph import group
from weft.dataflow.metrics import Metrics
from weft.dataflow.operation import Shape, TrainingBatch
from weft.dataflow.runs.files import LOG
from weft.dataflow.runs.log import LogReader
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote


class SimulatedCluster(Simulated, Cluster):
    """Simulated ranks with processes that can be replaced; tests override what they need."""

    address: str | None = None
    wait_s: float = 0.0

    @property
    def cluster(self) -> Cluster:
        return self

    def vacant(self, group: WorkerGroup) -> Collection[int]:
        return ()

    def sample_at(self, group: WorkerGroup, rank: int) -> int | None:
        return None

    def lost_nodes(self, *, look: bool) -> Collection[str]:
        return ()

    def unreadable(self, segments: Collection[Segment]) -> Mapping[Segment, str]:
        return {}

    def delete(self, node: str, file: str) -> None:
        pass

    def release(self, group: WorkerGroup, rank: int) -> None:
        raise NotImplementedError

    def report(self, run: str, metrics: Mapping[str, float]) -> None:
        pass


class Rollout(ToyRollout):
    """An interruptible rollout, as real engines are."""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        reads=("prompt_ids",),
        writes=("response_ids", "response_logprobs", "response_versions"),
    )
    def generate(self, prompts: Batch, *, n: int = 2) -> Iterator[tuple[Batch, Metrics]]:
        yield from super().generate(prompts, n=n)


class Actor(ToyActor):
    """An actor that takes its batch in parts."""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=lambda loss: ("prompt_ids", "response_ids", *loss.reads),
        may_read=("response_versions",),
        takes=lambda epochs: TrainingBatch(accumulates=epochs == 1),
    )
    def update(
        self,
        samples: Batch,
        *,
        loss: ToyLoss = ToyLoss(),
        epochs: int = 1,
        minibatches: int = 1,
        last: bool = True,
    ) -> Metrics:
        return super().update(samples, loss=loss)


def costs(
    lengths: LogNormal | tuple[tuple[int, ...], ...],
    step_s: Any = 1.0,
    *,
    dispatch_s: float = 0.0,
    **generation: Any,
) -> CostModel:
    return CostModel(
        nodes={
            "rollout.generate": Generation(lengths=lengths, decode_step_s=step_s, **generation),
            "reward.score": LinearCost(fixed_s=1.0),
            "actor.update": LinearCost(fixed_s=2.0, per_token_s=0.1),
            "actor.publish_weights": LinearCost(fixed_s=0.5),
            "rollout.receive_weights": LinearCost(fixed_s=0.25),
        },
        dispatch_s=dispatch_s,
    )


def apart(rollout: int, actor: int) -> dict[str, Place]:
    return {
        "rollout": Place(ResourcePool("generating", cpus=rollout), rollout),
        "actor": Place(ResourcePool("training", cpus=actor), actor),
    }


def groups(rollout: int = 1, actor: int = 1, max_num_seqs: int = 256) -> dict[str, Any]:
    """Return handles of the toy groups, with this many ranks in each replica."""
    made = {
        "rollout": group(Rollout, ranks_per_replica=rollout, max_num_seqs=max_num_seqs),
        "reward": group(ToyReward),
        "actor": group(Actor, ranks_per_replica=actor),
    }
    made["rollout"].follows(made["actor"])
    return made


def run(
    root: Path,
    schedule: Training,
    backend: Simulated | Local,
    placement: dict[str, Place] | None = None,
    *,
    graph: Callable[..., Any] = toy_grpo,
    number: int = 40,
    n: int = 2,
    max_num_seqs: int = 256,
    **settings: Any,
) -> Driver:
    driver = Driver(
        graph(prompts(number), n=n, **groups(max_num_seqs=max_num_seqs)),
        schedule=schedule,
        placement=placement,
        backend=backend,
        root=root,
        name=f"run-{len(list(root.iterdir()))}",
        progress=False,
        **{"record_every": 0, **settings},
    )
    with driver:
        driver.run()
    return driver


def times(driver: Driver) -> list[float]:
    """Return the end time of each step. [s]"""
    return [row["time_s"] for row in driver.directory.metrics[1:]]


def trained(driver: Driver) -> list[tuple[int, ...]]:
    """Return the row ids of each update call."""
    log = LogReader(driver.directory.path / "buffer" / LOG)
    return [tuple(r["ids"]) for r in log if r["do"] == "claim" and r["node"] == "actor.update"]


def calls(driver: Driver, node: str) -> np.ndarray:
    """Return [calls, (start, end)] in seconds, by end time."""
    return np.array([(c["start_s"], c["end_s"]) for c in driver.directory.timeline if c["node"] == node])


KNOWN = ((3, 5), (2, 7))
"""Lengths for prompts of 2 and 3 tokens: the groups have 12 and 15 tokens."""
