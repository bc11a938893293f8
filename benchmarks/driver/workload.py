"""A run with many simulated ranks. Driver, schedule, ledger and log are real."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

import weft
from weft.controllers.backends.backend import Event
from weft.controllers.group import Call
from weft.controllers.ranks.tasks import Task
from weft.controllers.simulation.costs import CostModel, Generation, LinearCost, LogNormal
from weft.dataflow.metrics import Metrics
from weft.dataflow.operation import TrainingBatch
from weft.workers.worker import remote

SAMPLES = 16
"""Responses per prompt."""
STEP_ROWS = 8_192
"""[rows] Batch of an update, if that many rows are in flight."""
LENGTHS = LogNormal(mean=500, sigma=0.8, max_tokens=2000)
DECODE_S = 0.02
"""[s] Decode step of a replica."""
MAX_NUM_SEQS = 256
"""Concurrent responses of a replica."""
TRAINING_OVER_GENERATION = 8
"""Duration of an update, over the generation of as many rows on all replicas: generation is faster,
so rows soon fill the staleness bound."""


class Settings(weft.Config):
    """Settings of all workers."""

    max_num_seqs: int = MAX_NUM_SEQS


class Rollout(weft.Worker):
    Config = Settings

    @remote(
        dispatch=weft.Dispatch.SPLIT_BY_DP,
        shape=weft.Shape.EXPAND,
        interruptible=True,
        reads=("prompt_ids",),
        writes=("response_ids", "response_logprobs", "response_versions"),
    )
    def generate(self, prompts: weft.Batch, *, n: int = SAMPLES) -> Iterator[weft.Batch]: ...

    @remote(dispatch=weft.Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: Any) -> str: ...


class Reward(weft.Worker):
    Config = Settings

    @remote(dispatch=weft.Dispatch.SPLIT_BY_DP, reads=("response_ids",), writes=("reward",))
    def score(self, samples: weft.Batch) -> weft.Batch: ...


class Actor(weft.Worker):
    Config = Settings

    @classmethod
    def shares_prompts(cls, config: Any) -> bool:
        return True

    @remote(
        dispatch=weft.Dispatch.SPLIT_BY_DP,
        reads=("prompt_ids", "response_ids", "advantages"),
        takes=lambda epochs: TrainingBatch(accumulates=epochs == 1),
    )
    def update(self, samples: weft.Batch, *, epochs: int = 1, last: bool = True) -> Metrics: ...

    @remote(dispatch=weft.Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int, receivers: Sequence[str]) -> Any: ...

    @remote(dispatch=weft.Dispatch.ONE_TO_ALL)
    def finish_publishing(self, version: int) -> Any: ...


@weft.node(shape=weft.Shape.GROUP, reads=("reward",), writes=("advantages",))
def centred(samples: weft.Batch) -> weft.Batch:
    """Placeholder that nobody calls: the simulator invents its columns."""
    return samples


@weft.graph
def reinforce(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
    return actor.update(centred(reward.score(rollout.generate(prompts, n=SAMPLES))))


class Timed(weft.Simulated):
    """A simulator that measures its CPU time, and counts calls and tasks.

    Workers run while the driver works, so the driver's CPU time advances their clock.
    """

    def __init__(self, costs: CostModel) -> None:
        super().__init__(costs)
        self.own_s = 0.0
        self.calls = 0
        self.tasks = 0
        self._last = -1
        self._left = time.process_time()

    def wait(self, timeout_s: float) -> Sequence[Event]:
        before = time.process_time()
        self._now += before - self._left
        events = super().wait(timeout_s)
        self._left = time.process_time()
        self.own_s += self._left - before
        return events

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        self.calls += call.number != self._last
        self.tasks += 1
        self._last = call.number
        super()._submit(rank, task, call)


@dataclass(frozen=True)
class Work:
    """The size of a run."""

    prompts: int
    """Prompts per step."""
    staleness: int
    """Maximum staleness, in updates."""
    ranks: int
    """Generating ranks, and as many training ranks."""

    @classmethod
    def of(cls, rows_in_flight: int, ranks: int, step_rows: int = STEP_ROWS) -> Work:
        """Return work with about this many rows in flight, in steps of `step_rows` or a third of
        the rows."""
        prompts = max(1, min(step_rows, rows_in_flight // 3) // SAMPLES)
        return cls(prompts, max(1, round(rows_in_flight / (prompts * SAMPLES)) - 1), ranks)

    @property
    def step_rows(self) -> int:
        return self.prompts * SAMPLES

    @property
    def costs(self) -> CostModel:
        """Costs with training slower than generation, so that rows wait within the staleness
        bound."""
        generation_s = self.step_rows * LENGTHS.mean * DECODE_S / (self.ranks * MAX_NUM_SEQS)
        return CostModel(
            nodes={
                "rollout.generate": Generation(lengths=LENGTHS, decode_step_s=DECODE_S),
                "reward.score": LinearCost(fixed_s=0.05, per_row_s=0.001),
                "actor.update": LinearCost(fixed_s=TRAINING_OVER_GENERATION * generation_s),
                "actor.publish_weights": LinearCost(fixed_s=0.5),
                "rollout.receive_weights": LinearCost(fixed_s=0.5),
            }
        )

    @contextmanager
    def driver(
        self, steps: int, backend: weft.Simulated, stop: Callable[[Any], bool]
    ) -> Iterator[weft.Driver]:
        """Yield a driver for a run of this work."""
        rollout, reward, actor = weft.group(Rollout), weft.group(Reward), weft.group(Actor)
        rollout.follows(actor)
        table = pa.table({"prompt_ids": [[1] * (50 + k % 100) for k in range(max(1024, self.prompts))]})
        graph = reinforce(
            weft.TableSource("prompts", table), rollout=rollout, reward=reward, actor=actor
        )
        beside = max(1, self.ranks // 16)
        placement = {
            "rollout": weft.Place(weft.ResourcePool("generating", cpus=self.ranks), self.ranks),
            "actor": weft.Place(weft.ResourcePool("training", cpus=self.ranks), self.ranks),
            "reward": weft.Place(weft.ResourcePool("beside", cpus=beside), beside),
        }
        schedule = weft.Asynchronous(
            steps=steps,
            prompts_per_step=self.prompts,
            max_staleness=self.staleness,
            groups_per_part=max(1, self.prompts // 8),
        )
        with (
            tempfile.TemporaryDirectory() as root,
            weft.Driver(
                graph,
                schedule=schedule,
                placement=placement,
                backend=backend,
                root=root,
                progress=False,
                stop=stop,
            ) as driver,
        ):
            yield driver
