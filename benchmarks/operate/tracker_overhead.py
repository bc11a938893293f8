"""The cost of trackers: the driver's time, and interleaved steps with and without them."""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

import weft
from weft.controllers.reports.tracker_threads import TrackerThreads
from weft.dataflow.batch import Batch
from weft.dataflow.config import Config
from weft.dataflow.metrics import Mean, Metrics
from weft.dataflow.operation import TrainingBatch
from weft.workers.dispatch import Dispatch
from weft.workers.worker import Worker, remote

TRACKERS = ("tensorboard",)
"""Trackers among the development packages. The driver does the same work for any other."""
METRICS = 60
"""Metrics per step, as many as in a PPO run."""


class RestConfig(Config):
    step_s: float = 0.25
    """[s] Duration of an update, short enough to show the trackers' share."""


class Resting(Worker):
    """Waits, and reports as many metrics as an update of PPO."""

    Config = RestConfig

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("prompt_ids",), takes=TrainingBatch())
    def update(self, rows: Batch) -> Metrics:
        time.sleep(self.config.step_s)
        return {f"metric_{number}": Mean(float(number)) for number in range(METRICS)}


@weft.graph
def training(rows: Any, *, actor: Any) -> Any:
    return actor.update(rows)


class Timed:
    """Adds up the driver's time in a method."""

    def __init__(self, following: TrackerThreads) -> None:
        self.seconds = 0.0
        self._stepped = following.stepped
        following.stepped = self.stepped  # pyright: ignore[reportAttributeAccessIssue]

    def stepped(self, row: Any) -> None:
        began = time.perf_counter()
        self._stepped(row)
        self.seconds += time.perf_counter() - began


def steps_of(
    root: Path, name: str, trackers: Sequence[str], steps: int, step_s: float
) -> dict[str, float]:
    """Run some steps, and return the median step, and driver and CPU time for trackers [s]."""
    source = weft.TableSource(
        "rows", pa.table({"prompt_ids": pa.array([[1, 2]] * 8, pa.list_(pa.int32()))})
    )
    actor = weft.group(Resting, step_s=step_s, name="actor")
    before = resource.getrusage(resource.RUSAGE_SELF)
    with weft.Driver(
        training(source, actor=actor),
        schedule=weft.Synchronous(steps=steps, prompts_per_step=4),
        trackers=trackers,
        root=root,
        name=name,
        record_every=0,
        progress=False,
    ) as driver:
        timed = Timed(driver._history.trackers)
        began = time.perf_counter()
        metrics = driver.run()
        run_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    step = statistics.median(row["step_s"] for row in metrics[2:])
    return {"step_s": step, "driver_share": timed.seconds / run_s, "cpu_s": cpu_s}


def measure(*, steps: int = 40, rounds: int = 3, step_s: float = 0.25) -> dict[str, float]:
    """Return the tracker figures of `benchmarks/operate.py`.

    Returns:
        `tracker_overhead_share`: share of a run's time that its driver spends on trackers, largest
            of all rounds;
        `tracker_step_ratio`: median step with trackers over that without, median of rounds (mostly
            noise on a busy machine);
        `tracker_cpu_s`: CPU seconds that trackers add to a run, median of rounds.
    """
    with tempfile.TemporaryDirectory(prefix="weft-trackers-") as folder:
        run = partial(steps_of, Path(folder), steps=steps, step_s=step_s)
        pairs = [(run(f"plain-{k}", ()), run(f"tracked-{k}", TRACKERS)) for k in range(rounds)]
    return {
        "tracker_overhead_share": max(tracked["driver_share"] for _, tracked in pairs),
        "tracker_step_ratio": statistics.median(
            tracked["step_s"] / plain["step_s"] for plain, tracked in pairs
        ),
        "tracker_cpu_s": statistics.median(
            tracked["cpu_s"] - plain["cpu_s"] for plain, tracked in pairs
        ),
    }


if __name__ == "__main__":
    print(measure())
