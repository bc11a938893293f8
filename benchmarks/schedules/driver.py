"""What the driver costs: milliseconds of CPU time for a row and for a call, by the number of rows in flight.

    python benchmarks/schedules/driver.py                                   # 1e3 to 1e6 rows in flight, 512 replicas
    python benchmarks/schedules/driver.py --rows 100000 --profile 40        # the functions that take the time, slower for being watched

The driver, its schedule, ledger and log are the real ones. Workers are simulated on a clock of their own, and the simulator's time is
not counted. Generation runs ahead as far as the rows in flight allow, and takes new weights meanwhile. The last line printed is one
JSON object.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

import weft
from weft.controllers.backends.backend import Event
from weft.controllers.group import Call
from weft.controllers.ranks.tasks import Task
from weft.controllers.simulation.costs import CostModel, Generation, LinearCost, LogNormal
from weft.dataflow.metrics import Metrics
from weft.dataflow.takes import TrainingBatch
from weft.workers.remote import remote

ROWS = (1_000, 10_000, 100_000, 1_000_000)
SAMPLES = 16
"""Responses to a prompt."""
STALENESS = 3
"""Updates that generation runs ahead."""
ANSWERED = 20_000
"""Least number of rows that are answered in the counted steps, so that few rows in flight are measured as long as many."""


class Settings(weft.Config):
    """The workers have none."""


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

    @remote(
        dispatch=weft.Dispatch.SPLIT_BY_DP,
        reads=("response_ids", "advantages"),
        takes=lambda epochs: TrainingBatch(accumulates=epochs == 1),
    )
    def update(self, samples: weft.Batch, *, epochs: int = 1, last: bool = True) -> Metrics: ...

    @remote(dispatch=weft.Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int) -> Any: ...


@weft.node(shape=weft.Shape.GROUP, reads=("reward",), writes=("advantages",))
def centred(samples: weft.Batch) -> weft.Batch:
    """It is never called: the simulator invents its columns."""
    return samples


@weft.graph
def reinforce(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
    return actor.update(centred(reward.score(rollout.generate(prompts, n=SAMPLES))))


class Timed(weft.Simulated):
    """Counts the simulator's own seconds, and the calls that it is given."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__(costs)
        self.own_s = 0.0
        self.calls = 0
        self._last = -1

    def wait(self, timeout_s: float) -> Sequence[Event]:
        before = time.process_time()
        try:
            return super().wait(timeout_s)
        finally:
            self.own_s += time.process_time() - before

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        self.calls += call.number != self._last
        self._last = call.number
        super()._submit(rank, task, call)


LENGTHS = LogNormal(mean=500, sigma=0.8, max_tokens=2000)


@dataclass(frozen=True)
class Cost:
    """What the counted steps cost."""

    rows_in_flight: int
    rows: int
    """Responses that were trained on."""
    calls: int
    driver_s: float
    simulator_s: float

    @property
    def figures(self) -> dict[str, float]:
        return {
            "ms_per_row": round(1000 * self.driver_s / self.rows, 5),
            "ms_per_call": round(1000 * self.driver_s / self.calls, 4),
            "rows": self.rows,
            "calls": self.calls,
            "rows_in_flight": self.rows_in_flight,
            "simulator_ms_per_row": round(1000 * self.simulator_s / self.rows, 5),
        }


def simulation(each: int, replicas: int) -> tuple[Any, dict[str, weft.Place], CostModel]:
    """The graph, its placement, and what its calls cost, for so many prompts a step."""
    rollout, reward, actor = weft.group(Rollout), weft.group(Reward), weft.group(Actor)
    rollout.follows(actor)
    table = pa.table({"prompt_ids": [[1] * (50 + k % 100) for k in range(max(1024, each))]})
    graph = reinforce(weft.TableSource("prompts", table), rollout=rollout, reward=reward, actor=actor)
    beside = max(1, replicas // 16)
    placement = {
        "rollout": weft.Place(weft.ResourcePool("generating", cpus=replicas), replicas),
        "actor": weft.Place(weft.ResourcePool("training", cpus=replicas), replicas),
        "reward": weft.Place(weft.ResourcePool("beside", cpus=beside), beside),
    }
    seconds = 0.02 * each * SAMPLES / replicas
    costs = CostModel(
        nodes={
            "rollout.generate": Generation(lengths=LENGTHS, decode_step_s=0.02, max_num_seqs=256),
            "reward.score": LinearCost(fixed_s=0.05, per_row_s=0.001),
            "actor.update": LinearCost(fixed_s=seconds, per_row_s=0.02),
            "actor.publish_weights": LinearCost(fixed_s=0.5),
            "rollout.receive_weights": LinearCost(fixed_s=0.5),
        }
    )
    return graph, placement, costs


def measure(rows: int, replicas: int, profile: cProfile.Profile | None = None) -> Cost:
    """Run with about so many rows in flight; the first steps, in which their number grows, are not counted."""
    each = max(1, rows // (SAMPLES * STALENESS))
    warm_up = STALENESS + 2
    counted = max(2, -(-ANSWERED // (each * SAMPLES)))
    graph, placement, costs = simulation(each, replicas)
    backend = Timed(costs)
    most = 0
    marks: list[tuple[float, float, int]] = []

    def look(metrics: Any) -> bool:
        nonlocal most
        assert driver.buffer is not None
        most = max(most, len(driver.buffer.ledgers["train"].live.rows))
        if metrics["step"] == warm_up and profile is not None:
            profile.enable()
        marks.append((time.process_time(), backend.own_s, backend.calls))
        return metrics["step"] >= warm_up + counted

    with (
        tempfile.TemporaryDirectory() as root,
        weft.Driver(
            graph,
            schedule=weft.Asynchronous(
                steps=warm_up + counted + STALENESS + 1,  # it is stopped before
                prompts_per_step=each,
                max_staleness=STALENESS,
                groups_per_part=max(1, each // 8),
            ),
            placement=placement,
            backend=backend,
            buffer=weft.BufferConfig(sync_interval_s=1e9),
            root=root,
            progress=False,
            stop=look,
        ) as driver,
    ):
        driver.run()
    if profile is not None:
        profile.disable()
    gc.collect()
    (began, simulated, calls), (ended, simulated_then, calls_then) = marks[warm_up], marks[warm_up + counted]
    own = simulated_then - simulated
    return Cost(most, counted * each * SAMPLES, calls_then - calls, ended - began - own, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, nargs="*", default=ROWS, help="rows in flight; each number is a run of its own"
    )
    parser.add_argument("--replicas", type=int, default=512, help="of the rollouts, and of the actor")
    parser.add_argument(
        "--profile", type=int, default=0, help="how many of the functions that take the most time to show"
    )
    asked = parser.parse_args()
    found: dict[int, dict[str, float]] = {}
    for rows in asked.rows:
        profile = cProfile.Profile() if asked.profile else None
        cost = measure(rows, asked.replicas, profile)
        found[rows] = cost.figures
        print(f"{rows:>9,} rows: {json.dumps(cost.figures)}", flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(asked.profile)
    each = [figures["ms_per_row"] for figures in found.values()]
    largest = round(max(each) / min(each), 2)
    print(json.dumps({"driver": found, "replicas": asked.replicas, "largest_over_smallest_ms_per_row": largest}))


if __name__ == "__main__":
    main()
